"""Runs the tests in every surroundings of `variations.py`, one after another."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.project import ROOT, checkout
from matrix.variations import Variation, as_user, variations

WORKERS = ("-n", "auto", "--maxprocesses", "4")
OUTCOMES = ("passed", "failed", "skipped")
STDERR = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", default="", metavar="WORD", help="the variations whose names have this in them")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    args, options = parser.parse_known_args()
    rows = []
    for variation in variations():
        if args.only in variation.name:
            print(f"{variation.name} ...", file=sys.stderr, flush=True)
            rows.append(row(variation, options))
    print(json.dumps({"pytest": options, "rows": rows}, indent=1) if args.json else table(rows))
    return int(not rows or any(row["failures"] for row in rows))


def row(variation: Variation, options: list[str]) -> dict[str, Any]:
    if variation.missing:
        return {"name": variation.name, "skipped_because": variation.missing, "failures": []}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.xml"
        try:
            root, python = place(variation, Path(scratch))
        except subprocess.CalledProcessError as error:
            return {"name": variation.name, "failures": [f"its environment could not be made: {error.stdout[-2000:]}"]}
        pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *WORKERS, f"--junitxml={results}", *options]
        command, environment = [*variation.before, *as_user(variation.user), *pytest], surroundings(variation, Path(scratch))
        done = subprocess.run(command, cwd=root, env=environment, stdout=STDERR, check=False)
        found, failures = read(results)
    if done.returncode not in (0, 1) or (done.returncode == 1) != bool(failures):
        failures = [*failures, f"pytest ended with {done.returncode}"]
    return {"name": variation.name, **found, "seconds": round(time.monotonic() - start), "failures": failures}


def place(variation: Variation, scratch: Path) -> tuple[Path, str]:
    """Return the checkout of the tests and its interpreter; make a copy with an environment if needed."""
    if not variation.folder:
        return ROOT, variation.python
    root = checkout(scratch / variation.folder)
    if variation.user is not None:
        scratch.chmod(0o777)
        for path in (root, *root.rglob("*")):
            os.chown(path, variation.user, variation.user, follow_symlinks=False)
    command = [*as_user(variation.user), "make", f"PYTHON={variation.python}", ".venv/stage-test"]
    options = dict(check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    subprocess.run(command, cwd=root, env=surroundings(variation, scratch), **options)
    if variation.newest:
        subprocess.run([".venv/bin/python", "-m", "pip", "install", "-q", "--upgrade", *variation.newest], cwd=root, **options)
    return root, ".venv/bin/python"


def surroundings(variation: Variation, scratch: Path) -> dict[str, str]:
    # Workers that wait for threads must not spin on the cores that these need.
    variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ, **variation.variables}
    if variation.without:
        variables["PATH"] = str(commands_without(variation.without, scratch / "bin"))
    if variation.user is not None:
        home = scratch / "home"
        home.mkdir(mode=0o555, exist_ok=True)
        variables["HOME"] = str(home)
        variables["MPLCONFIGDIR"] = str(scratch)  # elsewhere matplotlib warns of such a home, among dilkit's own lines
    return variables


def commands_without(names: tuple[str, ...], folder: Path) -> Path:
    """Link every command on PATH into `folder` but these, whatever number or machine is in their names."""
    folder.mkdir()
    for place in os.environ.get("PATH", os.defpath).split(os.pathsep):
        for command in Path(place).glob("*"):
            link = folder / command.name
            if not any(name in command.name for name in names) and not os.path.lexists(link):
                link.symlink_to(command)
    return folder


def read(results: Path) -> tuple[dict[str, int], list[str]]:
    counts = Counter()
    failures = []
    for case in ElementTree.parse(results).iter("testcase") if results.exists() else ():
        kinds = {child.tag for child in case}
        failed = bool(kinds & {"failure", "error"})
        counts["failed" if failed else "skipped" if "skipped" in kinds else "passed"] += 1
        if failed:
            failures.append(f"{case.get('classname')}::{case.get('name')}")
    return {name: counts[name] for name in OUTCOMES}, failures


def table(rows: list[dict[str, Any]]) -> str:
    width = max((len(row["name"]) for row in rows), default=0)
    lines = [f"{'':{width}}" + "".join(f"{name:>9}" for name in (*OUTCOMES, "seconds"))]
    for row in rows:
        cells = "".join(f"{row.get(name, ''):>9}" for name in (*OUTCOMES, "seconds"))
        lines.append(f"{row['name']:{width}}" + (f"  not run: {row['skipped_because']}" if "skipped_because" in row else cells))
    lines += [f"{row['name']}: {failure}" for row in rows for failure in row["failures"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
