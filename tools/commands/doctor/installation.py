"""What is installed and set: versions, extensions, threads, files, environment variables."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import dilkit
from dilkit import backends, comm, environment, files
from dilkit.device import probe
from dilkit.pattern import Pattern, broken_kinds
from dilkit.problem import Problem
from dilkit.selection import tuned
from dilkit.threads import usable_cores
from dilkit.tools.commands.doctor.finding import Finding, absent, works, wrong
from dilkit.tools.commands.info.facts import Failure, guarded, variables, versions
from dilkit.tools.console.text import error_line

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
