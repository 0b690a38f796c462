"""A newcomer's machine: a copy of the checkout, and as bare surroundings as this machine can be made to look.

The home folder and the one for temporary files are empty; there is no C++ compiler; gcc knows nothing newer than AVX2, and torch
and MKL are told to use no more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CXX = ("g++", "c++", "clang++")
GCC = ("gcc", "cc")
TOO_NEW = ("-mavx512*", "-mamx*")
ROWS = ("Python 3.13", "LANG=C", "path", "one core", "another user")
"""Rows of the matrix of surroundings in which tests have failed. `no C++` is not among them, as it always holds here."""
VARIABLES = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
HIDDEN = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "MAKEFLAGS", "MAKELEVEL", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")


def copy_checkout(target: Path) -> Path:
    """Copy the files that git tracks, as they are now, and new ones that it does not ignore."""
    for name in filter(None, output("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def surroundings(folder: Path) -> dict[str, str]:
    """The variables of the environment, of which HOME, TMPDIR and PATH name folders that are made in `folder`."""
    places = {name: folder / name.lower() for name in ("HOME", "TMPDIR", "PATH")}
    for place in (folder, *places.values()):
        place.mkdir(exist_ok=True)
        place.chmod(0o777)  # a row of the matrix is another user
    fill(places["PATH"])
    hidden = {name for name in os.environ if name in HIDDEN or name.startswith(("DILKIT_", "PYTEST_"))}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, **VARIABLES, **{name: str(place) for name, place in places.items()}}


def fill(folder: Path) -> None:
    """Links to every command that is on PATH but C++ compilers, and C compilers that take no instruction set after AVX2."""
    for place in os.environ.get("PATH", os.defpath).split(os.pathsep):
        for command in [] if ROOT in Path(place).resolve().parents else Path(place).glob("*"):
            link = folder / command.name
            if not any(name in command.name for name in CXX) and not os.path.lexists(link):
                link.symlink_to(command)
    for name in GCC:
        if compiler := shutil.which(name):
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_text(OLD_COMPILER.format(name=name, too_new="|".join(TOO_NEW), compiler=compiler))
            (folder / name).chmod(0o755)


OLD_COMPILER = """#!/bin/sh
for argument; do
    case "$argument" in {too_new}) echo "{name}: error: unrecognized command-line option '$argument'" >&2; exit 1;; esac
done
exec {compiler} "$@"
"""


def output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
