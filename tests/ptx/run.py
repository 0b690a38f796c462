"""Runs the PTX of every CUDA kernel on the CPU, over the lists of the kernels' tests, and compares with the oracle.

    python tests/ptx/run.py [--seed N] [--only TEXT] [--share I/N] [--json FILE]

A trial's name and the seed that is printed with it repeat it, with the order in which its warps run. Exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ptx.trials import Outcome, every_trial, run
from tqdm import tqdm


def main() -> int:
    """0 when no trial failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0, help="of the orders in which warps run")
    parser.add_argument("--only", default="", help="trials whose names hold this text")
    parser.add_argument("--share", default="1/1", help="which of how many shares of the trials to run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came of them there")
    args = parser.parse_args()
    number, shares = map(int, args.share.split("/"))
    trials = [trial for trial in every_trial() if args.only in trial.name][number - 1 :: shares]
    outcomes = []
    for trial in tqdm(trials, unit="trial"):
        outcomes.append(run(trial, args.seed))
        if reason := outcomes[-1].reason:
            tqdm.write(f"FAILED --seed {args.seed} --only '{trial.name}'\n    {reason}")
    for line in table(outcomes):
        print(line)
    if args.json:
        args.json.write_text(json.dumps({"seed": args.seed, "trials": [*map(record, outcomes)]}, indent=1) + "\n")
    return int(not outcomes or any(outcome.reason for outcome in outcomes))


def table(outcomes: Iterable[Outcome]) -> list[str]:
    """A line for each list and kind of device: trials, failures, the largest error (`worst`), minutes of CPU time."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        trial = outcome.trial
        key = f"{trial.listed:8} sm_{trial.capability[0]}{trial.capability[1]:<3}{'rounded' if trial.rounded else '':8}"
        groups.setdefault(key, []).append(outcome)
    return [f"{key} {summary(group)}" for key, group in sorted(groups.items())]


def summary(group: list[Outcome]) -> str:
    failed, seconds = sum(bool(outcome.reason) for outcome in group), sum(outcome.seconds for outcome in group)
    worst = max((outcome.worst for outcome in group if not outcome.reason), default=float("nan"))
    return f"{len(group):4} trials {failed:3} failed, worst {worst:5.2f}, {seconds / 60:6.1f} min"


def record(outcome: Outcome) -> dict[str, Any]:
    return dict(name=outcome.trial.name, reason=outcome.reason, worst=outcome.worst, seconds=round(outcome.seconds, 2))


if __name__ == "__main__":
    sys.exit(main())
