"""The extensions built with AddressSanitizer and UBSan in a copy of the checkout, and what Python needs to run them there."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import Cython.Build
import setuptools
from helpers.project import ROOTS, checkout

SANITIZE = "-fsanitize=address,undefined"
FLAGS = f"-O1 -g {SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer"
LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so")
"""Libraries that must be loaded before Python: the sanitizers, and what they wrap of C++ for torch."""
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
"""Python itself leaks, and tests ask for more memory than there is."""
MISSING = f"gcc cannot link {SANITIZE} here (Debian: libasan8, libtsan2, libubsan1)"


def links(folder: Path, flag: str = SANITIZE) -> bool:
    command = ["gcc", flag, "-x", "c", "-", "-o", str(folder / "empty")]
    return subprocess.run(command, input=b"int main(void) { return 0; }", check=False).returncode == 0


def build(copy: Path) -> list[setuptools.Extension]:
    """Copy the checkout to `copy`, and build every extension there, as setup.py says: the package has to import."""
    found: list[setuptools.Extension] = []

    def chosen(extensions, **options):
        found.extend(extensions)
        for extension in found:
            extension.extra_compile_args = [flag for flag in extension.extra_compile_args if flag != "-O3"]
        return cythonize(found, **options)

    cythonize = Cython.Build.cythonize
    os.chdir(checkout(copy))
    with (
        mock.patch.object(Cython.Build, "cythonize", chosen),
        mock.patch.dict(os.environ, CFLAGS=FLAGS, LDFLAGS=SANITIZE),
        mock.patch.object(sys, "argv", ["setup.py", "--quiet", "build_ext", "--inplace"]),
    ):
        runpy.run_path("setup.py", run_name="__main__")
    for name, folder in ROOTS.items():  # or an editable installation finds these packages, and its own extensions in them
        if name != "dilkit":
            Path(*name.split(".")).symlink_to(Path("..", folder), target_is_directory=True)
    return found


def environment(copy: Path) -> dict[str, str]:
    """The variables that Python needs in the copy, beside those at hand: the sanitizers are loaded first."""
    preload = " ".join(subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip() for name in LIBRARIES)
    return {**OPTIONS, "LD_PRELOAD": preload, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
