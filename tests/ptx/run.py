"""Runs the PTX of every kernel for GPUs on the CPU, over the lists of the kernels' tests, and compares with the oracle.

    python tests/ptx/run.py [--backend NAME] [--seed N] [--only TEXT] [--share I/N] [--out FILE] [--anew]

Trials that docs/results/ptx.json has of the kernels as they are do not run again, unless they were wrong; results of the others
are added to it. A trial's name and the seed that is printed with it repeat it, with the order in which its warps run. The last
lines are reasons of skipped trials; Ctrl-C ends a run early. Exit code 1 if a trial fails, not all are run, or all are skipped.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ptx.trials import MODULES, Outcome, Trial, every_trial, is_installed, run
from tqdm import tqdm

from dilkit.device import probe
from dilkit.tools.bench.suites.ptx import Broken, Executed, Key, PTXResult, digest
from dilkit.tools.results.environment import now
from dilkit.tools.results.file import new_result, read_result, write_result

PLACE = Path(__file__).parents[2] / "docs/results/ptx.json"


def main() -> int:
    """Return 0 when no trial failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", choices=MODULES, help="only this one's kernels")
    parser.add_argument("--seed", type=int, default=0, help="of the orders in which warps run")
    parser.add_argument("--only", default="", help="trials whose names hold this text")
    parser.add_argument("--share", default="1/1", help="which of how many shares of the trials to run")
    parser.add_argument("--out", type=Path, metavar="FILE", default=PLACE, help="the file (default: %(default)s)")
    parser.add_argument("--anew", action="store_true", help="run also what the file has")
    args = parser.parse_args()
    number, shares = map(int, args.share.split("/"))
    able = {args.backend} if args.backend else {*filter(is_installed, MODULES)}
    every = every_trial()
    executed, broken = read(args.out)
    asked = [trial for trial in every if args.only in trial.name and trial.backend in able][number - 1 :: shares]
    chosen = [trial for trial in asked if args.anew or not is_known(trial, executed)]
    print(f"{len(asked) - len(chosen)} of {len(asked)} trials are in {args.out}")
    outcomes = list[Outcome]()
    with suppress(KeyboardInterrupt):
        for trial in tqdm(chosen, unit="trial"):
            outcomes.append(run(trial, args.seed))
            if reason := outcomes[-1].reason:
                tqdm.write(f"FAILED --seed {args.seed} --only '{trial.name}'\n    {reason}")
    print(*summary(outcomes), sep="\n")
    write(args.out, brought_up_to_date(executed, every, outcomes), broken)
    failed, all_skipped = any(outcome.reason for outcome in outcomes), all(outcome.skipped for outcome in outcomes)
    return int(failed or len(outcomes) < len(chosen) or not asked or (bool(chosen) and all_skipped))


def summary(outcomes: list[Outcome]) -> Iterator[str]:
    """Yield a line for each reason why trials were skipped, then the numbers of trials and launches."""
    reasons = Counter(f"{outcome.trial.backend}: {outcome.skipped}" for outcome in outcomes if outcome.skipped)
    yield from (f"skipped {count:4} of {reason}" for reason, count in sorted(reasons.items()))
    failed, launches = sum(bool(one.reason) for one in outcomes), sum(one.launches for one in outcomes)
    worst = max((one.worst for one in outcomes if not one.reason and not one.skipped), default=float("nan"))
    counts = f"{len(outcomes)} trials, {failed} failed, {reasons.total()} skipped, {launches} launches"
    yield f"{counts}, worst error {worst:.2f}, {sum(one.seconds for one in outcomes) / 60:.1f} minutes of CPU time"


def read(path: Path) -> tuple[list[Executed], list[Broken]]:
    """Return the results for the kernels as they are."""
    result = read_result(path, PTXResult) if path.exists() else None
    executed, broken = (result.executed, result.broken) if result else ((), ())
    return (
        [one for one in executed if one.source == digest(one.backend)],
        [one for one in broken if one.source == digest(one.backend)],
    )


def write(path: Path, executed: Iterable[Executed], broken: Iterable[Broken]) -> None:
    write_result(new_result(PTXResult, probe("cpu"), executed=tuple(executed), broken=tuple(broken)), path)


def is_known(trial: Trial, executed: Iterable[Executed]) -> bool:
    """Return True if the trial was run, and was not wrong."""
    return any(trial.case_name in (*one.passed, *one.refused) for one in executed if one.key == key_of(trial))


def key_of(trial: Trial) -> Key:
    return trial.backend, trial.listed, trial.architecture, trial.rounded


def brought_up_to_date(known: Iterable[Executed], every: Iterable[Trial], outcomes: Iterable[Outcome]) -> list[Executed]:
    """Return a row for each group of `every`, with what is known and what was run now."""
    rows = {one.key: one for one in known}
    groups: dict[Key, list[Trial]] = {}
    anew: dict[Key, list[Outcome]] = {}
    for trial in every:
        groups.setdefault(key_of(trial), []).append(trial)
    for outcome in outcomes:
        anew.setdefault(key_of(outcome.trial), []).append(outcome)
    return [_row(key, group, rows.get(key), anew.get(key, [])) for key, group in groups.items()]


def _row(key: Key, group: list[Trial], known: Executed | None, outcomes: list[Outcome]) -> Executed:
    backend, listed, architecture, rounded = key
    of: dict[str, Any] = dict(backend=backend, listed=listed, architecture=architecture, rounded=rounded)
    row = replace(known or Executed(**of, trials=0, source=digest(backend)), trials=len(group))
    anew = {outcome.trial.case_name for outcome in outcomes}
    kept = {trial.case_name for trial in group} - anew
    came: dict[str, list[str]] = dict(
        passed=[name for name in row.passed if name in kept],
        refused=[name for name in row.refused if name in kept],
        wrong=[text for text in row.wrong if text.split(": ", 1)[0] in kept],
    )
    for outcome in outcomes:
        name = outcome.trial.case_name
        kind = "refused" if outcome.skipped else "wrong" if outcome.reason else "passed"
        came[kind].append(f"{name}: --seed {outcome.seed}: {outcome.reason}" if kind == "wrong" else name)
    seconds = round(row.seconds + sum(outcome.seconds for outcome in outcomes), 1)
    fields: dict[str, Any] = {kind: tuple(sorted(names)) for kind, names in came.items()}
    return replace(row, **fields, seconds=seconds, date=now() if outcomes else row.date)


if __name__ == "__main__":
    sys.exit(main())
