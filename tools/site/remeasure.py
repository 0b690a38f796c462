"""Measures anew what the pages show of CPUs: runs the commands whose results are kept in docs/results/, and keeps what they find.

    python -m dilkit.tools.site.remeasure [NAME ...]

It runs in the root of a checkout. A result takes the place of the one before only when its command has ended well.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from dilkit.tools.report import registry
from dilkit.tools.results.file import write_result
from dilkit.tools.results.rows import RowsResult
from dilkit.tools.site.figures import SIDE_BY_SIDE

LENGTHS = "1024,2048,4096,8192,16384,32768"
BENCH = {
    "overhead": "--overhead --segments dense --heads 2 --dim 8",
    "orders": "--suite orders",
    "sdpa-against-gather": "--seq 16384 --backend sdpa --baseline gather --backward --budget 100 --repeats 9",
    "lengths": f"--seqs {LENGTHS} --segments 1024,2048,4096 --backend native,sdpa --baseline dense,gather --budget 5 --repeats 5",
    "serving": "--suite serving",
    "slides": "--suite slides",
    "patterns": "--suite patterns",
    "scores": "--suite scores",
    "ring": "--suite ring",
    "hosts": "--suite hosts",
    "cpu": "--suite cpu",
    "seeds": "--suite seeds",
}
DEMOS = {"demo-ranks": "demo --ranks 2x2", "demo": "demo", "demo-llama": "demo --llama"}
COMMANDS = {**DEMOS, **{name: f"bench {options}" for name, options in BENCH.items()}}
"""Commands by name of the result file: the arguments of `dilkit`, the quickest first. The CUDA kernels' files are made by `make
kernels` and `make costs`."""


def main() -> int:
    """Measure the named results, or all; return 0 when all were measured, else 1."""
    parser = argparse.ArgumentParser(prog="python -m dilkit.tools.site.remeasure", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(COMMANDS)} (default: all)")
    names = parser.parse_args().names or [*COMMANDS]
    if unknown := [name for name in names if name not in COMMANDS]:
        parser.error(f"{', '.join(unknown)}: no such result; known: {', '.join(COMMANDS)}")
    failed = [name for name in names if not remeasure(name, Path("docs", "results"))]
    if failed:
        print(f"not measured, and left as before: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def remeasure(name: str, folder: Path) -> bool:
    """Run the command of result `name` and put its result into `folder`; return True if it ended well."""
    with tempfile.TemporaryDirectory() as place:
        command = f"dilkit {COMMANDS[name]} --out {name}"
        print(f"{name}: {command}", flush=True)
        if subprocess.run([sys.executable, "-m", *command.split()], cwd=place, stdin=subprocess.DEVNULL, check=False).returncode:
            return False
        (path,) = Path(place, name).glob("*.json")
        result = registry.read(path)
        if name in SIDE_BY_SIDE and isinstance(result, RowsResult):
            name += "-" + re.sub("[^a-z0-9]+", "-", result.machine.lower()).strip("-")
        write_result(result, folder / f"{name}.json")
    return True


if __name__ == "__main__":
    sys.exit(main())
