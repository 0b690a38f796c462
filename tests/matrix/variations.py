"""The surroundings that the tests have to pass in."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dilkit.backends.native import _native

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
CAPABILITIES = ("default", "avx2", "avx512")
"""Settings of torch, each after those that its machines have too: torch does not check whether the machine can."""
MKL = {"default": "SSE4_2", "avx2": "AVX2", "avx512": "AVX512"}
"""The setting of MKL that goes with a capability of torch."""


NEWEST = ("torch", "transformers", "accelerate")
CXX = ("g++", "c++", "clang++")
OTHER_USER = 65534


BASE = getattr(sys, "_base_executable", sys.executable)


@dataclass(frozen=True)
class Variation:
    """One row of the matrix.

    `folder`: name of a copy of the checkout with an environment of its own. `user`: number of a user without a writable home.
    `without`: commands missing on PATH. `before`: prefix of the tests' command. `newest`: packages in their newest versions,
    whatever constraints.txt says.
    """

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable
    folder: str = ""
    missing: str = ""
    without: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    user: int | None = None
    newest: tuple[str, ...] = ()


def variations() -> Iterator[Variation]:
    able = CAPABILITIES[: CAPABILITIES.index(torch.backends.cpu.get_cpu_capability().lower()) + 1]
    absent = {name: "" if name in able else "this machine does not have it" for name in CAPABILITIES}
    for name in CAPABILITIES:
        yield Variation(f"torch {name}", {"ATEN_CPU_CAPABILITY": name}, missing=absent[name])
    for name, setting in MKL.items():
        why = absent[name] if torch.backends.mkl.is_available() else "this torch has no MKL"
        yield Variation(f"MKL {setting}", {"MKL_ENABLE_INSTRUCTIONS": setting}, missing=why)
    for name in _native.instruction_sets():
        yield Variation(f"dilkit {name}", {"DILKIT_CPU_ISA": name})
    for threads in ("1", "2", "4"):
        yield Variation(f"threads {threads}", {"OMP_NUM_THREADS": threads})
    yield one_core()
    yield Variation("LANG=C", {"LANG": "C", "LC_ALL": "C"})
    yield Variation("no C++", without=CXX)
    yield another_user()
    yield Variation("path", folder="mein Gerät", python=BASE)
    yield Variation("newest packages", folder="newest", python=BASE, newest=NEWEST)
    for version in PYTHONS:
        if version != f"{sys.version_info.major}.{sys.version_info.minor}":
            python = interpreter(version)
            yield Variation(f"Python {version}", {}, python, f"python{version}", "" if python else "no such interpreter here")


def interpreter(version: str) -> str:
    """A Python of this version, on PATH or of pyenv; empty if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = pyenv.glob(f"{version}.*/bin/python") if os.access(pyenv, os.R_OK) else ()
    places = [shutil.which(f"python{version}"), *map(str, sorted(found))]
    return next((place for place in places if place and works(place)), "")


def one_core() -> Variation:
    core = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    why = "" if shutil.which("taskset") else "there is no taskset"
    return Variation("one core", before=("taskset", "--cpu-list", str(core)), missing=why)


def another_user() -> Variation:
    python = next((python for python in (BASE, "/usr/bin/python3") if works(*as_user(OTHER_USER), python)), "")
    why = "only root can become another user" if os.geteuid() else "" if python else "other users can start no Python here"
    return Variation("another user", python=python, folder="user", user=OTHER_USER, missing=why)


def as_user(user: int | None) -> tuple[str, ...]:
    """Return the command prefix of a user; `env`, because root still finds the first command for it."""
    return () if user is None else ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "env")


def works(*python: str) -> bool:
    """True if it starts: pyenv's commands work only for versions that are switched on."""
    try:
        return subprocess.run([*python, "-c", ""], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
