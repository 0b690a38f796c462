"""`dilkit compare OLD NEW`: changes between two result files, measurement by measurement."""

import argparse
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dilkit.checks import visible
from dilkit.tools.console.arguments import number
from dilkit.tools.console.text import aligned, in_seconds, print_json
from dilkit.tools.results.environment import Result
from dilkit.tools.results.file import ResultError
from dilkit.tools.results.rows import YARDSTICKS, ResultRow, RowsResult
from dilkit.tools.results.statistics import LEAST, ratio_interval

HELP = "compare two result files: exit code 1 if something got slower beyond noise"
MARGIN = 0.05
"""Difference of runs of the same code on the same machine, beyond the spread of the samples of one run."""
FACTS = ("device_name", "cpu", "cores", "threads", "capability", "cuda", "system", "python", "torch", "numpy", "dilkit")
"""Facts of the environment that explain a change."""
SLOWER, FASTER, SAME, YARDSTICK, FEW = "slower", "faster", "no change beyond noise", "yardstick", "too few samples to tell"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, metavar="OLD", help="the JSON file of the earlier run")
    parser.add_argument("new", type=Path, metavar="NEW", help="the JSON file of the later run, of the same kind")
    share = number("a share from 0 to 10, such as 0.05 for 5%", lambda value: 0 <= value <= 10)
    margin = "a change counts where the 95%% interval of the ratio is beyond 1 + SHARE, or below 1 / (1 + SHARE) (default 0.05)"
    parser.add_argument("--margin", type=share, default=MARGIN, metavar="SHARE", help=margin)
    parser.add_argument("--all", action="store_true", help="also the measurements that did not change")


def run(args: argparse.Namespace) -> int:
    """Compare and print; 1 where something got slower beyond noise, else 0. Raises `ResultError`."""
    (new, new_times), (old, old_times) = load(args.new), load(args.old)
    if old.kind != new.kind:
        raise ResultError(args.new, f"a result of kind {new.kind!r}, {args.old} is of {old.kind!r}; compare two of a kind")
    if getattr(old, "quick", 0) != getattr(new, "quick", 0):
        raise ResultError(
            args.new, f"made with --quick, unlike {args.old}, or the other way round; run the same command for both"
        )
    changes = compare(old_times, new_times, args.margin)
    if not changes:
        raise ResultError(args.new, f"measures nothing that {args.old} measures; run the same command for both")
    verdicts = Counter(change["verdict"] for change in changes)
    old_facts, new_facts = facts_of(old), facts_of(new)
    facts = [(name, old_facts.get(name, "-"), new_facts.get(name, "-")) for name in {**old_facts, **new_facts}]
    report = dict(
        old=visible(str(args.old)),
        new=visible(str(args.new)),
        changes=changes,
        only_old=[what for what in old_times if what not in new_times],
        only_new=[what for what in new_times if what not in old_times],
        differences=[fact for fact in facts if fact[1] != fact[2]],
        regressions=verdicts[SLOWER],
        margin=args.margin,
    )
    if args.json:
        print_json("compare", report)
        return int(verdicts[SLOWER] > 0)
    rows = [("new / old", "95% interval", "old", "new", "", "what")]
    for one in (one for one in changes if args.all or one["verdict"] != SAME):
        interval = "-" if one["verdict"] == FEW else "{:.3f} - {:.3f}".format(*one["interval"])
        rows.append((f"{one['ratio']:.3f}", interval, *map(in_seconds, (one["old"], one["new"])), one["verdict"], one["what"]))
    print(f"old: {report['old']}", f"new: {report['new']}", sep="\n")
    print(*(f"{name} differs: {a} -> {b}\n" for name, a, b in facts if a != b), sep="")
    print(*(aligned(rows) if len(rows) > 1 else ()), sep="\n")
    print(*(f"only in {side}: {what}\n" for side in ("old", "new") for what in report[f"only_{side}"]), sep="")
    counts = f"{len(changes)} measurements in both: {verdicts[SLOWER]} slower, {verdicts[FASTER]} faster"
    print(f"{counts}, {verdicts[SAME]} without a change beyond noise (margin {args.margin:.0%})")
    return 1 if verdicts[SLOWER] else 0


def load(path: Path) -> tuple[Result, dict[str, ResultRow]]:
    """Return a result, and its rows with samples by words that are the same in every file that has them. Raises `ResultError`."""
    from dilkit.tools.report import registry  # loads every kind of result, which --help of all commands need not wait for

    result, measured = registry.read(path), {}
    for row in result.rows if isinstance(result, RowsResult) else ():
        if row.samples:
            place = ", ".join(f"{name} {value}" for name, value in row.case.items())
            measured[f"{row.table}, {place}: {row.who}"] = row
    if not measured:
        raise ResultError(path, f"a result of kind {result.kind!r} without samples: nothing in it can be compared")
    return result, measured


def facts_of(result: Result) -> dict[str, str]:
    """Return the facts of a result that explain a change: where its problem differs too, the figures are of another problem."""
    known = {name: str(value) for name in FACTS if (value := getattr(result.environment, name)) is not None}
    facts = getattr(result, "facts", {})
    return known | {name: str(value) for name, value in facts.items() if isinstance(value, str | int | float)}


def compare(old: Mapping[str, ResultRow], new: Mapping[str, ResultRow], margin: float) -> list[dict[str, Any]]:
    """Return medians in seconds, new over old with its interval, and the verdict, of what both have; the largest change first."""
    changes = []
    for what, one in old.items():
        if what in new:
            other = new[what]
            low, high = ratio_interval(other.samples, one.samples)
            verdict = SLOWER if low > 1 + margin else FASTER if high < 1 / (1 + margin) else SAME
            if one.who in YARDSTICKS:
                verdict = YARDSTICK
            elif min(len(one.samples), len(other.samples)) < LEAST:
                verdict = FEW
            change = dict(what=what, old=one.median_s, new=other.median_s, ratio=other.median_s / one.median_s)
            changes.append(change | dict(interval=(low, high), verdict=verdict))
    return sorted(changes, key=lambda change: (-abs(math.log(change["ratio"])), change["what"]))
