"""`dilkit compare OLD NEW`: changes between two result files, measurement by measurement."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from dilkit.checks import visible
from dilkit.tools.console.arguments import number
from dilkit.tools.console.text import aligned, in_seconds, print_json
from dilkit.tools.results.file import ResultError
from dilkit.tools.results.record import Measurement, Result
from dilkit.tools.results.statistics import LEAST, Interval, middle, ratio, ratio_interval

HELP = "compare two result files: exit code 1 if something got slower beyond noise"
MARGIN = 0.05
"""Difference of runs of the same code on the same machine, beyond the spread of the samples of one run."""
FACTS = ("device_name", "cpu", "cores", "threads", "capability", "cuda", "system", "python", "torch", "numpy", "dilkit")
"""Facts of the environment that explain a change."""
SLOWER, FASTER, SAME, YARDSTICK, FEW = "slower", "faster", "no change beyond noise", "yardstick", "too few samples to tell"


@dataclass(frozen=True)
class Change:
    """A measurement of both files: medians in seconds, new over old with its interval, and the verdict on that."""

    what: str
    old: float
    new: float
    ratio: float
    interval: Interval
    verdict: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two files, the margin and --all."""
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
    verdicts = Counter(change.verdict for change in changes)
    old_facts, new_facts = facts_of(old), facts_of(new)
    facts = [(name, old_facts.get(name, "-"), new_facts.get(name, "-")) for name in {**old_facts, **new_facts}]
    report = dict(
        old=visible(str(args.old)),
        new=visible(str(args.new)),
        changes=[asdict(change) for change in changes],
        only_old=[what for what in old_times if what not in new_times],
        only_new=[what for what in new_times if what not in old_times],
        differences=[fact for fact in facts if fact[1] != fact[2]],
        regressions=verdicts[SLOWER],
        margin=args.margin,
    )
    if args.json:
        print_json("compare", report)
        return 1 if verdicts[SLOWER] else 0
    rows = [("new / old", "95% interval", "old", "new", "", "what")]
    for c in (c for c in changes if args.all or c.verdict != SAME):
        interval = "-" if c.verdict == FEW else f"{c.interval[0]:.3f} - {c.interval[1]:.3f}"
        rows.append((f"{c.ratio:.3f}", interval, in_seconds(c.old), in_seconds(c.new), c.verdict, c.what))
    print(f"old: {report['old']}", f"new: {report['new']}", sep="\n")
    print(*(f"{name} differs: {a} -> {b}\n" for name, a, b in facts if a != b), sep="")
    print(*(aligned(rows) if len(rows) > 1 else ()), sep="\n")
    print(*(f"only in {side}: {what}\n" for side in ("old", "new") for what in report[f"only_{side}"]), sep="")
    counts = f"{len(changes)} measurements in both: {verdicts[SLOWER]} slower, {verdicts[FASTER]} faster"
    print(f"{counts}, {verdicts[SAME]} without a change beyond noise (margin {args.margin:.0%})")
    return 1 if verdicts[SLOWER] else 0


def load(path: Path) -> tuple[Result, dict[str, Measurement]]:
    """Return a result and its measurements by their words. Raises `ResultError`."""
    from dilkit.tools.report import registry  # loads every kind of result, which --help of all commands need not wait for

    result = registry.read(path)
    measurements = {one.what: one for one in result.measurements()}
    if not measurements:
        raise ResultError(path, f"a result of kind {result.kind!r} without samples: nothing in it can be compared")
    return result, measurements


def facts_of(result: Result) -> dict[str, str]:
    """Return the facts of a result that explain a change."""
    known = {name: getattr(result.environment, name) for name in FACTS}
    return {name: str(value) for name, value in known.items() if value is not None} | result.problem_facts()


def compare(old: Mapping[str, Measurement], new: Mapping[str, Measurement], margin: float) -> list[Change]:
    """Return the changes of what both have measured, the largest first."""
    changes = [_change(one, new[what], margin) for what, one in old.items() if what in new]
    return sorted(changes, key=lambda change: (-abs(math.log(change.ratio)), change.what))


def _change(old: Measurement, new: Measurement, margin: float) -> Change:
    low, high = ratio_interval(new.samples, old.samples)
    verdict = SLOWER if low > 1 + margin else FASTER if high < 1 / (1 + margin) else SAME
    if old.yardstick:
        verdict = YARDSTICK
    elif min(len(old.samples), len(new.samples)) < LEAST:
        verdict = FEW
    medians = middle(old.samples), middle(new.samples)
    return Change(old.what, *medians, ratio(new.samples, old.samples), (low, high), verdict)
