"""Runs the PTX of every kernel for GPUs on the CPU against the oracle; docs/results/ptx.json has the results."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ptx.trials import MODULES, Outcome, Trial, every_trial, is_installed, run
from tqdm import tqdm

from dilkit.device import probe
from dilkit.tools.bench.suites.ptx import FAULTS, TRIALS, current, digest
from dilkit.tools.results.environment import now
from dilkit.tools.results.file import new_result, read_result, write_result
from dilkit.tools.results.rows import ResultRow, RowsResult

PLACE = Path(__file__).parents[2] / "docs/results/ptx.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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


def read(path: Path) -> tuple[list[ResultRow], list[ResultRow]]:
    rows = [row for row in read_result(path, RowsResult, "ptx").rows if current(row)] if path.exists() else []
    return [row for row in rows if row.table == TRIALS], [row for row in rows if row.table == FAULTS]


def write(path: Path, executed: Iterable[ResultRow], broken: Iterable[ResultRow]) -> None:
    write_result(new_result(RowsResult, probe("cpu"), kind="ptx", rows=(*executed, *broken)), path)


def is_known(trial: Trial, executed: Iterable[ResultRow]) -> bool:
    rows = (row.values for row in executed if (row.who, row.case) == group_of(trial))
    return any(trial.case_name in (*values["passed"], *values["refused"]) for values in rows)


def group_of(trial: Trial) -> tuple[str, dict[str, Any]]:
    return trial.backend, dict(listed=trial.listed, architecture=trial.architecture, rounded=trial.rounded)


def brought_up_to_date(known: Iterable[ResultRow], every: Iterable[Trial], outcomes: Iterable[Outcome]) -> list[ResultRow]:
    """Return a row for each group of `every`, with what is known and what was run now."""
    rows = {str((row.who, row.case)): row for row in known}
    groups: dict[str, list[Trial]] = {}
    anew: dict[str, list[Outcome]] = {}
    for trial in every:
        groups.setdefault(str(group_of(trial)), []).append(trial)
    for outcome in outcomes:
        anew.setdefault(str(group_of(outcome.trial)), []).append(outcome)
    return [_row(group, rows.get(key), anew.get(key, [])) for key, group in groups.items()]


def _row(group: list[Trial], known: ResultRow | None, outcomes: list[Outcome]) -> ResultRow:
    backend, case = group_of(group[0])
    nothing = dict(source=digest(backend), date="", seconds=0.0, passed=[], refused=[], wrong=[])
    values = known.values if known else nothing
    anew = {outcome.trial.case_name for outcome in outcomes}
    kept = {trial.case_name for trial in group} - anew
    kinds = "passed", "refused", "wrong"
    came = {kind: [text for text in values[kind] if text.split(": ", 1)[0] in kept] for kind in kinds}
    for outcome in outcomes:
        name = outcome.trial.case_name
        kind = "refused" if outcome.skipped else "wrong" if outcome.reason else "passed"
        came[kind].append(f"{name}: --seed {outcome.seed}: {outcome.reason}" if kind == "wrong" else name)
    seconds = round(values["seconds"] + sum(outcome.seconds for outcome in outcomes), 1)
    counted = dict(trials=len(group), seconds=seconds, date=now() if outcomes else values["date"])
    names = {kind: sorted(names) for kind, names in came.items()}
    return ResultRow(table=TRIALS, case=case, who=backend, values=values | counted | names)


if __name__ == "__main__":
    sys.exit(main())
