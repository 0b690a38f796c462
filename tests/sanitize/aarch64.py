"""Builds the C of the CPU kernel for aarch64 and runs it over the problems under qemu: so NEON is executed on any machine.

python tests/sanitize/aarch64.py [--if-possible]
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sanitize.problems import build, every_case, write_problems

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
PACKAGES = {COMPILER: "gcc-aarch64-linux-gnu libc6-dev-arm64-cross", EMULATOR: "qemu-user"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--if-possible", action="store_true", help="a machine without the tools is no failure")
    args = parser.parse_args()
    missing = [f"{tool} (Debian: {packages})" for tool, packages in PACKAGES.items() if shutil.which(tool) is None]
    if missing:
        print(f"aarch64: not run: no {', no '.join(missing)}", flush=True)
        return 0 if args.if_possible else 2
    with tempfile.TemporaryDirectory() as folder:
        write_problems(Path(folder, "problems"), every_case())
        build(Path(folder, "driver"), COMPILER, ["-O3"], {"generic": []})
        print("aarch64: ", end="", flush=True)
        emulate = [EMULATOR, "-L", libraries(), Path(folder, "driver"), Path(folder, "problems")]
        return subprocess.run(emulate, check=False).returncode


def libraries() -> Path:
    return Path(subprocess.check_output([COMPILER, "-print-file-name=libc.so.6"], text=True).strip()).parents[1]


if __name__ == "__main__":
    sys.exit(main())
