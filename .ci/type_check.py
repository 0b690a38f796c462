"""Runs mypy on the packages as they are installed: `backends/` within `dilkit`, and so on. `make lint` calls it.

mypy names a module after the folders that it lies in. So the top-level folders are linked into one folder as an installation has
them, and that is what mypy reads.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = ROOT / "build" / "types"
WITHIN = ("backends", "comm", "tools")


def lay_out() -> Path:
    """The folder `dilkit` with all packages in it, made of links into the checkout."""
    package = LAYOUT / "dilkit"
    package.mkdir(parents=True, exist_ok=True)
    for old in package.iterdir():
        old.unlink()
    for path in [*(ROOT / "dilkit").iterdir(), *(ROOT / folder for folder in WITHIN)]:
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    return package


if __name__ == "__main__":
    command = [sys.executable, "-m", "mypy", *sys.argv[1:], str(lay_out().relative_to(ROOT))]
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)
