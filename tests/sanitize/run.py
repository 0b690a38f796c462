"""Builds the C of the CPU kernel with AddressSanitizer and UBSan, then with ThreadSanitizer, and runs it over the problems.

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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sanitize.problems import build, write_problems

X86 = platform.machine().lower() in ("x86_64", "amd64")
WIDE = {name: ["-Wno-psabi"] for name in ("avx512", "avx512bf16", "amx")}
CODES = {"generic": []} | ({"avx2": ["-mavx2", "-mfma"], **WIDE} if X86 else {})
SANITIZERS = {"address and undefined": ("address,undefined", "-O1"), "thread": ("thread", "-O2")}
"""How gcc takes them. It needs half as long for the first at -O1, and warns wrongly about the second there."""


def main() -> int:
    """0 when every build ran without a finding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--if-possible", action="store_true", help="a compiler without the sanitizers is no failure")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        problems = Path(folder, "problems")
        write_problems(problems)
        codes = [run(Path(folder), name, *flags, problems, args.if_possible) for name, flags in SANITIZERS.items()]
    return max(codes)


def run(folder: Path, name: str, flag: str, level: str, problems: Path, if_possible: bool) -> int:
    """Build with one set of sanitizers, and run; the exit code."""
    flags = ["-g", "-fno-var-tracking", level, f"-fsanitize={flag}", "-fno-sanitize-recover=all"]  # else gcc takes twice as long
    empty = ["gcc", *flags, "-x", "c", "-", "-o", folder / "empty"]
    if subprocess.run(empty, input=b"int main(void) { return 0; }", check=False).returncode:
        print(f"{name}: not run: gcc cannot link -fsanitize={flag} here (Debian: libasan8, libtsan2, libubsan1)", flush=True)
        return 0 if if_possible else 2
    build(folder / "driver", "gcc", flags, CODES)
    print(f"{name}: ", end="", flush=True)
    return subprocess.run([folder / "driver", problems], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
