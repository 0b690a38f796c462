"""`dilkit doctor`: parts of this installation that work, parts that do not, and the way out."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import dilkit
from dilkit import backends, comm, environment, files
from dilkit.device import probe
from dilkit.pattern import Pattern, broken_kinds
from dilkit.problem import Problem
from dilkit.selection import tuned
from dilkit.threads import usable_cores
from dilkit.tools.commands.facts import Failure, Finding, absent, all_of, guarded, variables, versions, works, wrong
from dilkit.tools.console.interrupt import load_torch
from dilkit.tools.console.text import error_line, print_json, table
from dilkit.tools.results.decode import encode

HELP = """\
check this installation: what works, what does not, and the way out

Every backend computes a small problem, forward and gradients, against the fp64 oracle; two ranks meet over each transport;
compiled modules, threads, files and DILKIT_* variables are looked at. What is optional and absent is not wrong. Exit code 1 when
anything is wrong. The report of a bug should have what it prints."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""


def run(args: argparse.Namespace) -> int:
    """Print what was found. 0 = nothing is wrong, 1 = something is."""
    guarded(load_torch)
    parts: dict[str, Callable[[], Iterable[Finding]]] = {
        "installation": installed,
        "compiled modules": extensions,
        "threads": threads,
        "backends": partial(_computing, "backends"),
        "GPUs": partial(_computing, "gpus"),
        "ranks": partial(_computing, "ranks"),
        "files": kept_files,
        "environment": set_variables,
    }
    found = {title: all_of(look) for title, look in parts.items()}
    wrong = [finding for findings in found.values() for finding in findings if finding.state == "WRONG"]
    if args.json:
        print_json("doctor", dict(right=not wrong, parts=encode(found)))
    else:
        print("\n".join(_lines(found, len(wrong))))
    return 1 if wrong else 0


def _computing(part: str) -> Iterator[Finding]:
    """A part that cannot even be imported without torch."""
    from dilkit.tools.commands import doctor_checks as computing

    looked: Iterator[Finding] = getattr(computing, part)()
    return looked


def _lines(found: dict[str, list[Finding]], wrong: int) -> Iterator[str]:
    for title, findings in found.items():
        yield from (title, *table((one.name, one.state, str(one)) for one in findings), "")
    yield f"{wrong} WRONG: each names its way out" if wrong else "nothing is wrong"


REINSTALL = "install dilkit again, from a wheel or with a C compiler: pip install --force-reinstall --no-deps dilkit"


def installed() -> Iterator[Finding]:
    """dilkit, Python and what dilkit needs."""
    for name, found in versions().items():
        if not isinstance(found, Failure):
            yield works(name.replace("_", " "), str(found))
        else:
            yield wrong(name, str(found), REINSTALL if name == "plan_module" else f"pip install --force-reinstall {name}")
    for kind, reason in broken_kinds().items():
        yield wrong(f"kind {kind}", reason, "all other kinds work without it")


def extension_names() -> list[str]:
    """Every compiled module, found by the stub that is installed beside it."""
    names = []
    for package in (dilkit, backends, comm):
        root = Path(package.__path__[0])
        for stub in sorted(root.rglob("_*.pyi")):
            names.append(".".join([package.__name__, *stub.relative_to(root).with_suffix("").parts]))
    return list(dict.fromkeys(names))


def extensions() -> Iterator[Finding]:
    """Whether each compiled module can be loaded; of those built for several instruction sets, which of them runs."""
    for name in extension_names():
        try:
            module = importlib.import_module(name)
        except Exception as error:
            if sys.platform == "win32" and isinstance(error, ModuleNotFoundError):
                yield absent(name, "there is none for Windows")
                continue
            yield wrong(name, error_line(error), REINSTALL)
            continue
        chosen = ""
        if hasattr(module, "instruction_sets"):
            here, built = module.instruction_sets(), module.built_for()
            asked = guarded(partial(environment.cpu_isa, (*here, *environment.BF16_SETS)))
            runs = asked if asked in here else here[0]
            chosen = f"runs {runs}; built for {', '.join(built)}; this machine has {'all' if here == built else ', '.join(here)}"
        yield works(name, chosen or "loaded")


def threads() -> Iterator[Finding]:
    """How many threads torch computes with."""
    import torch

    count, cores = torch.get_num_threads(), usable_cores()
    more = f"; more than there are cores, which is slower: set OMP_NUM_THREADS={cores}" if count > cores else ""
    yield works("torch", f"{count} threads on {cores} cores{more}")


def kept_files() -> Iterator[Finding]:
    """The folder of compiled CUDA kernels, and the file of measured orders."""
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
    """The variables `DILKIT_*` that are set, known ones and others."""
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
