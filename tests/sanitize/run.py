"""Builds the C of the CPU kernel with AddressSanitizer and UBSan, then with ThreadSanitizer, and runs it over problems.

    python tests/sanitize/run.py [--if-possible]

The code for AVX-512 and AMX is built too, without those instructions: the compiler splits the wide vectors, and products of bf16
pairs and of tile registers are written out.
"""

import argparse
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sanitize.extensions import links
from sanitize.problems import build, every_case, shared_cases, write_problems

from dilkit.testing.problems import Case

X86 = platform.machine().lower() in ("x86_64", "amd64")
WIDE = {name: ["-Wno-psabi"] for name in ("avx512", "avx512bf16", "amx")}
CODES = {"generic": []} | ({"avx2": ["-mavx2", "-mfma"], **WIDE} if X86 else {})
SANITIZERS = ("address,undefined", "-O1", every_case, "1"), ("thread", "-O2", shared_cases, "4")
"""Names, optimisation, problems and least threads. gcc takes half as long at -O1, where it warns wrongly about `thread`."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--if-possible", action="store_true", help="a compiler without the sanitizers is no failure")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return max(run(Path(folder), *chosen, args.if_possible) for chosen in SANITIZERS)


def run(folder: Path, names: str, level: str, cases: Callable[[], Iterator[Case]], least_threads: str, if_possible: bool) -> int:
    flag = f"-fsanitize={names}"
    flags = ["-g", "-fno-var-tracking", level, flag, "-fno-sanitize-recover=all"]  # else gcc takes twice as long
    if not links(folder, flag):
        print(f"{names}: not run: gcc cannot link {flag} here (Debian: libasan8, libtsan2, libubsan1)", flush=True)
        return 0 if if_possible else 2
    build(folder / "driver", "gcc", flags, CODES)
    write_problems(folder / "problems", cases())
    print(f"{names}: ", end="", flush=True)
    return subprocess.run([folder / "driver", folder / "problems", least_threads], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
