"""The C files compile without a warning, under every compiler that is here."""

import functools
import shutil
import subprocess

import pytest
from helpers.project import ROOT, build_script

WARNINGS = ("-std=gnu11", "-O2", "-pthread", "-Wall", "-Wextra", "-Wconversion", "-Werror")
COMPILERS = {"gcc": "gcc", "clang": "clang", "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu"}


def sources():
    """The C files of the extensions; what Cython generates is not ours to mend."""
    folders = build_script()["C_FOLDERS"].values()
    return sorted(path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).glob("*.c"))


def test_every_c_file_is_of_an_extension():
    found = [path for folder in ("dilkit", "backends", "comm") for path in (ROOT / folder).rglob("[a-z]*.c")]
    assert sorted(path.relative_to(ROOT).as_posix() for path in found) == sources()


@functools.cache
def understands(compiler, flags):
    return compiled(compiler, *flags, "-x", "c", "-").returncode == 0


def compiled(*command):
    return subprocess.run([*command, "-fsyntax-only"], input="", capture_output=True, text=True, check=False)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("source", sources())
def test_no_warning(compiler, source):
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here (Debian: {COMPILERS[compiler]})")
    path, sets = ROOT / source, build_script()["INSTRUCTION_SETS"]
    own = tuple(sets.get(path.stem, ()))
    if not understands(compiler, own):
        pytest.skip(f"{compiler} does not know {path.stem}")
    done = compiled(compiler, *WARNINGS, *own, *(f"-DHAVE_{name.upper()}" for name in sets), f"-I{path.parent}", str(path))
    assert done.returncode == 0, done.stderr
