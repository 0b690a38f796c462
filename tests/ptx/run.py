"""Runs the PTX of every kernel for GPUs on the CPU, over the lists of the kernels' tests, and compares with the oracle.

    python tests/ptx/run.py [--backend NAME] [--seed N] [--only TEXT] [--share I/N] [--out FILE] [--anew]

What docs/results/ptx.json has of the kernels as they are is not run again, but for what was wrong; what came of the others is
added to it. A trial's name and the seed that is printed with it repeat it, with the order in which its warps run. Of what was
skipped the reasons are printed at the end; Ctrl-C is one. Exit code 1 if a trial fails, or not all are run, or all are skipped.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ptx import python_trials, results, trials
from ptx.backends import MODULES, is_installed
from ptx.trials import Outcome, run
from tqdm import tqdm


def main() -> int:
    """0 when no trial failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", choices=MODULES, help="only this one's kernels")
    parser.add_argument("--seed", type=int, default=0, help="of the orders in which warps run")
    parser.add_argument("--only", default="", help="trials whose names hold this text")
    parser.add_argument("--share", default="1/1", help="which of how many shares of the trials to run")
    parser.add_argument("--out", type=Path, metavar="FILE", default=results.PLACE, help="the file (default: %(default)s)")
    parser.add_argument("--anew", action="store_true", help="run also what the file has")
    args = parser.parse_args()
    number, shares = map(int, args.share.split("/"))
    able = {args.backend} if args.backend else {*filter(is_installed, MODULES)}
    every = [*trials.every_trial(), *python_trials.every_trial()]
    executed, broken = results.read(args.out)
    asked = [trial for trial in every if args.only in trial.name and trial.backend in able][number - 1 :: shares]
    chosen = [trial for trial in asked if args.anew or not results.is_known(trial, executed)]
    print(f"{len(asked) - len(chosen)} of {len(asked)} trials are in {args.out}")
    outcomes = []
    with suppress(KeyboardInterrupt):
        for trial in tqdm(chosen, unit="trial"):
            outcomes.append(run(trial, args.seed))
            if reason := outcomes[-1].reason:
                tqdm.write(f"FAILED --seed {args.seed} --only '{trial.name}'\n    {reason}")
    for line in (*table(outcomes), *skipped(outcomes)):
        print(line)
    results.write(args.out, results.brought_up_to_date(executed, every, outcomes), broken)
    failed, all_skipped = any(outcome.reason for outcome in outcomes), all(outcome.skipped for outcome in outcomes)
    return int(failed or len(outcomes) < len(chosen) or not asked or (bool(chosen) and all_skipped))


def table(outcomes: Iterable[Outcome]) -> list[str]:
    """A line for each backend, list and kind of device: trials, failures, what was skipped, launches where they are recorded, the
    largest error (`worst`) and minutes of CPU time."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        trial = outcome.trial
        key = f"{trial.backend:10} {trial.listed:8} {trial.architecture:7}{'rounded' if trial.rounded else '':8}"
        groups.setdefault(key, []).append(outcome)
    return [f"{key} {summary(group)}" for key, group in sorted(groups.items())]


def summary(group: list[Outcome]) -> str:
    failed, seconds = sum(bool(outcome.reason) for outcome in group), sum(outcome.seconds for outcome in group)
    left_out, launches = sum(bool(outcome.skipped) for outcome in group), sum(outcome.launches for outcome in group)
    worst = max((outcome.worst for outcome in group if not outcome.reason and not outcome.skipped), default=float("nan"))
    recorded = f", {launches:5} launches" if launches else ""
    counts = f"{len(group):4} trials {failed:3} failed {left_out:3} skipped{recorded}"
    return f"{counts}, worst {worst:5.2f}, {seconds / 60:6.1f} min"


def skipped(outcomes: Iterable[Outcome]) -> list[str]:
    """A line for each reason."""
    reasons = Counter(f"{outcome.trial.backend}: {outcome.skipped}" for outcome in outcomes if outcome.skipped)
    return [f"skipped {count:4} of {reason}" for reason, count in sorted(reasons.items())]


if __name__ == "__main__":
    sys.exit(main())
