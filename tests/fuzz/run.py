"""Runs the fuzzer: random steps against the oracle, under AddressSanitizer and UBSan where gcc has them."""

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

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.journal import CORPUS, keep
from helpers.project import ROOT
from sanitize.extensions import MISSING, build, environment, links

MOST_DEATHS = 10
"""After so many dead processes there is no point in another."""


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        home, variables = ROOT, dict(OMP_NUM_THREADS="1")
        if not args.without_sanitizers and links(Path(folder)):
            home = Path(folder, "copy")
            build(home)
            variables = dict(environment(home), PYTHONMALLOC="malloc")
        elif not args.without_sanitizers:
            print(f"without sanitizers: {MISSING}", flush=True)
            if not args.if_possible:
                return 2
        if args.replay:
            return start(home, variables, "--replay", *(str(path.resolve()) for path in args.replay))
        report = sessions(home, variables, Path(folder), args.minutes, args.seed, args.only)
    report["sanitizers"] = home != ROOT
    tell(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return bool(report["failures"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="how long (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--only", metavar="STEP", help="perform this one step alone, such as decoded")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE, too")
    parser.add_argument("--if-possible", action="store_true", help="a compiler without the sanitizers is no failure")
    parser.add_argument("--without-sanitizers", action="store_true", help="the extensions as they are installed")
    parser.add_argument("--replay", type=Path, nargs="+", metavar="FILE", help="perform the steps of these files instead")
    return parser.parse_args()


def start(home: Path, variables: dict[str, str], *options: str) -> int:
    command = [sys.executable, "tests/fuzz/session.py", *options]
    return subprocess.run(command, cwd=home, env={**os.environ, **variables}, check=False).returncode


def sessions(
    home: Path, variables: dict[str, str], folder: Path, minutes: float, seed: int, only: str | None = None
) -> dict[str, Any]:
    began, counts, failures, deaths = time.monotonic(), Counter[str](), list[str](), 0
    journal, found = folder / "journal", folder / "counts.json"
    first = seed
    while (left := minutes - (time.monotonic() - began) / 60) > 0 and deaths < MOST_DEATHS:
        found.unlink(missing_ok=True)
        options = dict(minutes=left, seed=seed, journal=journal, counts=found, found=CORPUS)
        options |= {} if only is None else dict(only=only)
        code = start(home, variables, *(text for name, value in options.items() for text in (f"--{name}", str(value))))
        counted = json.loads(found.read_text()) if found.exists() else dict(next=seed, counts={}, failures=[], ended=False)
        counts.update(counted["counts"])
        failures += counted["failures"]
        seed = counted["next"]
        if counted["ended"] and code == bool(counted["failures"]):
            break
        kept = keep(journal, CORPUS)
        failures.append(f"{kept.name}: the process ended with {code} at seed {seed}")
        print(f"{failures[-1]}; repeat it with: python tests/fuzz/run.py --replay {kept}", flush=True)
        seed, deaths = seed + 1, deaths + 1
    seconds = round(time.monotonic() - began)
    whole = dict(runs=counts.pop("runs", 0), compared=counts.pop("compared", 0))
    return dict(seconds=seconds, seeds=[first, seed], **whole, steps=dict(counts), failures=failures)


def tell(report: dict[str, Any]):
    steps, (first, end) = report["steps"], report["seeds"]
    print(f"{report['runs']:,} runs of {sum(steps.values()):,} steps in {report['seconds'] / 60:.0f} minutes, ", end="")
    print(f"seeds {first} to {end - 1}, {'with' if report['sanitizers'] else 'without'} sanitizers")
    print(", ".join(f"{name} {count:,}" for name, count in sorted(steps.items())))
    print(f"{report['compared']:,} calls of caches compared with whole sequences")
    print(f"{len(report['failures'])} failures", *report["failures"], sep="\n")


if __name__ == "__main__":
    sys.exit(main())
