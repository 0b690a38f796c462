"""Builds the C of the CPU kernel with AddressSanitizer and UBSan, then with ThreadSanitizer, and runs it over problems.

    python tests/sanitize/run.py [--if-possible]

The code for AVX-512 and AMX is built too, without those instructions: the compiler splits the wide vectors, and products of bf16
pairs and of tile registers are written out. With --if-possible, a compiler without the sanitizers is no failure.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from sanitize.problems import build, every_case, shared_cases, write_problems

from dilkit.testing.problems import Case

X86 = platform.machine().lower() in ("x86_64", "amd64")
WIDE = {name: ["-Wno-psabi"] for name in ("avx512", "avx512bf16", "amx")}
CODES = {"generic": []} | ({"avx2": ["-mavx2", "-mfma"], **WIDE} if X86 else {})


class Sanitizers(NamedTuple):
    """A build's sanitizers and level of optimisation, its problems, and the driver's further arguments."""

    names: str
    level: str
    cases: Callable[[], Iterator[Case]]
    arguments: tuple[str, ...] = ()


SANITIZERS = {
    "address and undefined": Sanitizers("address,undefined", "-O1", every_case),
    "thread": Sanitizers("thread", "-O2", shared_cases, ("4",)),
}
"""gcc needs half as long for the first at -O1, where it warns wrongly about the second."""


def main() -> int:
    """0 when every build ran without a finding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--if-possible", action="store_true", help="a compiler without the sanitizers is no failure")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return max(run(Path(folder), name, sanitizers, args.if_possible) for name, sanitizers in SANITIZERS.items())


def run(folder: Path, name: str, sanitizers: Sanitizers, if_possible: bool) -> int:
    """Build with one set of sanitizers, and run; the exit code."""
    flag = f"-fsanitize={sanitizers.names}"
    flags = ["-g", "-fno-var-tracking", sanitizers.level, flag, "-fno-sanitize-recover=all"]  # else gcc takes twice as long
    empty = ["gcc", *flags, "-x", "c", "-", "-o", folder / "empty"]
    if subprocess.run(empty, input=b"int main(void) { return 0; }", check=False).returncode:
        print(f"{name}: not run: gcc cannot link {flag} here (Debian: libasan8, libtsan2, libubsan1)", flush=True)
        return 0 if if_possible else 2
    build(folder / "driver", "gcc", flags, CODES)
    write_problems(folder / "problems", sanitizers.cases())
    print(f"{name}: ", end="", flush=True)
    return subprocess.run([folder / "driver", folder / "problems", *sanitizers.arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
