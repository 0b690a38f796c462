"""Builds the extensions of dilkit/orders with AddressSanitizer and UBSan in a copy of the checkout, and runs their tests there.

    python tests/sanitize/orders.py [--if-possible] [options of pytest]

Of interest are those that have C files of their own: the tests of `dilkit.orders._name` are tests/core/orders/test_name.py.
With --if-possible, a compiler without the sanitizers is no failure.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import Cython.Build
import setuptools
from helpers.project import checkout

SANITIZE = "-fsanitize=address,undefined"
FLAGS = f"-O1 -g {SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer"
LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so")
"""What must be loaded before Python: the sanitizers, and what they wrap of C++ for torch."""
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
"""Python itself leaks, and tests ask for more memory than there is."""


def main() -> int:
    """0 when the tests passed without a finding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--if-possible", action="store_true", help="a compiler without the sanitizers is no failure")
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        if not links(Path(folder)):
            print(f"orders: not run: gcc cannot link {SANITIZE} here (Debian: libasan8, libubsan1)", flush=True)
            return 0 if args.if_possible else 2
        copy = checkout(Path(folder, "copy"))
        tests = build(copy)
        print(f"orders: {', '.join(tests)}", flush=True)
        return run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--capture=sys", *tests, *options, cwd=copy)


def links(folder: Path) -> bool:
    """Whether gcc has the sanitizers."""
    command = ["gcc", SANITIZE, "-x", "c", "-", "-o", str(folder / "empty")]
    return subprocess.run(command, input=b"int main(void) { return 0; }", check=False).returncode == 0


def build(copy: Path) -> list[str]:
    """Build the extensions of dilkit/orders into the copy, as setup.py says; the files of tests of those with C of their own."""
    found = []

    def of_orders(extensions: list[setuptools.Extension], **options: object) -> list[setuptools.Extension]:
        found.extend(e for e in extensions if e.name.startswith("dilkit.orders."))
        for extension in found:
            extension.extra_compile_args = [flag for flag in extension.extra_compile_args if flag != "-O3"]
        return cythonize(found, **options)

    cythonize = Cython.Build.cythonize
    os.chdir(copy)
    with (
        mock.patch.object(Cython.Build, "cythonize", of_orders),
        mock.patch.dict(os.environ, CFLAGS=FLAGS, LDFLAGS=SANITIZE),
        mock.patch.object(sys, "argv", ["setup.py", "--quiet", "build_ext", "--inplace"]),
    ):
        runpy.run_path("setup.py", run_name="__main__")
    return [f"tests/core/orders/test_{e.name.rpartition('._')[2]}.py" for e in found if e.sources[1:]]


def run(*arguments: str, cwd: Path) -> int:
    """Run Python in the copy, the sanitizers loaded first; the exit code."""
    preload = " ".join(subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip() for name in LIBRARIES)
    environment = {**os.environ, **OPTIONS, "LD_PRELOAD": preload, "PYTHONPATH": str(cwd), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
