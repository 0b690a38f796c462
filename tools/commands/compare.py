"""`dilkit compare OLD NEW`: changes between two result files, measurement by measurement."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from dilkit.checks import visible
from dilkit.tools.console.arguments import number
from dilkit.tools.console.text import aligned, in_seconds, print_json
from dilkit.tools.results.file import ResultError
from dilkit.tools.results.record import Measurement
from dilkit.tools.results.statistics import LEAST, Interval, middle, ratio, ratio_interval

HELP = "compare two result files: exit code 1 if something got slower beyond noise"
MARGIN = 0.05
"""Difference of runs of the same code on the same machine, beyond the spread of the samples of one run."""
FACTS = ("device_name", "cpu", "cores", "threads", "capability", "cuda", "system", "python", "torch", "numpy", "dilkit")
"""Facts of the environment that explain a change."""
SLOWER, FASTER, SAME, YARDSTICK, FEW = "slower", "faster", "no change beyond noise", "yardstick", "too few samples to tell"


@dataclass(frozen=True)
class Measured:
    """The measurements of a result by their words, and the facts that explain a change."""

    kind: str
    quick: int
    facts: Mapping[str, str]
    found: Mapping[str, Measurement]


@dataclass(frozen=True)
class Change:
    """A measurement of both files: medians in seconds, new over old with its interval, and the verdict on that."""

    what: str
    old: float
    new: float
    ratio: float
    interval: Interval
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """All changes, the largest first; measurements of one file alone; other differences: (what, old, new)."""

    changes: tuple[Change, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]
    differences: tuple[tuple[str, str, str], ...]

    @property
    def regressions(self) -> tuple[Change, ...]:
        """Changes to slower beyond noise."""
        return tuple(change for change in self.changes if change.verdict == SLOWER)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two files, the margin and --all."""
    parser.add_argument("old", type=Path, metavar="OLD", help="the JSON file of the earlier run")
    parser.add_argument("new", type=Path, metavar="NEW", help="the JSON file of the later run, of the same kind")
    parser.add_argument(
        "--margin",
        type=number("a share from 0 to 10, such as 0.05 for 5%", lambda value: 0 <= value <= 10),
        default=MARGIN,
        metavar="SHARE",
        help="a change counts where all of the ratio's 95%% interval is beyond 1 + SHARE, or below 1 / (1 + SHARE) "
        "(default %(default)s: what runs of the same code differ by)",
    )
    parser.add_argument("--all", action="store_true", help="also the measurements that did not change")


def run(args: argparse.Namespace) -> int:
    """Compare and print; 1 where something got slower beyond noise, else 0. Raises `ResultError`."""
    new = load(args.new)
    old = load(args.old)
    if old.kind != new.kind:
        raise ResultError(args.new, f"a result of kind {new.kind!r}, {args.old} is of {old.kind!r}; compare two of a kind")
    if old.quick != new.quick:
        how = "with another --quick" if old.quick and new.quick else "with --quick" if new.quick else "without --quick"
        raise ResultError(args.new, f"made {how}, unlike {args.old}: other lengths; run the same command for both")
    if not old.found.keys() & new.found.keys():
        raise ResultError(args.new, f"measures nothing that {args.old} measures; run the same command for both")
    comparison = compare(old, new, args.margin)
    if args.json:
        report = asdict(comparison) | dict(regressions=len(comparison.regressions), margin=args.margin)
        print_json("compare", dict(old=visible(str(args.old)), new=visible(str(args.new)), **report))
    else:
        print("\n".join(_lines(comparison, args)))
    return 1 if comparison.regressions else 0


def load(path: Path) -> Measured:
    """Return the measurements of a file. Raises `ResultError`."""
    from dilkit.tools.report import registry  # loads every kind of result, which --help of all commands need not wait for

    result = registry.read(path)
    known = {name: getattr(result.environment, name) for name in FACTS}
    facts = {name: str(value) for name, value in known.items() if value is not None} | result.problem_facts()
    measurements = {one.what: one for one in result.measurements()}
    if not measurements:
        raise ResultError(path, f"a result of kind {result.kind!r} without samples: nothing in it can be compared")
    return Measured(result.kind, int(getattr(result, "quick", 0)), facts, measurements)


def compare(old: Measured, new: Measured, margin: float) -> Comparison:
    """Return the changes between two results, whose measurements are matched by their words."""
    changes = [_change(one, new.found[what], margin) for what, one in old.found.items() if what in new.found]
    changes.sort(key=lambda change: (-abs(math.log(change.ratio)), change.what))
    gone, fresh = (tuple(what for what in a if what not in b) for a, b in ((old.found, new.found), (new.found, old.found)))
    facts = [(name, old.facts.get(name, "-"), new.facts.get(name, "-")) for name in dict.fromkeys([*old.facts, *new.facts])]
    return Comparison(tuple(changes), gone, fresh, tuple(fact for fact in facts if fact[1] != fact[2]))


def _change(old: Measurement, new: Measurement, margin: float) -> Change:
    low, high = ratio_interval(new.samples, old.samples)
    verdict = SLOWER if low > 1 + margin else FASTER if high < 1 / (1 + margin) else SAME
    if old.yardstick:
        verdict = YARDSTICK
    elif min(len(old.samples), len(new.samples)) < LEAST:
        verdict = FEW
    medians = middle(old.samples), middle(new.samples)
    return Change(old.what, *medians, ratio(new.samples, old.samples), (low, high), verdict)


def _lines(comparison: Comparison, args: argparse.Namespace) -> list[str]:
    rows, changes = [("new / old", "95% interval", "old", "new", "", "what")], comparison.changes
    for c in (c for c in changes if args.all or c.verdict != SAME):
        interval = "-" if c.verdict == FEW else f"{c.interval[0]:.3f} - {c.interval[1]:.3f}"
        rows.append((f"{c.ratio:.3f}", interval, in_seconds(c.old), in_seconds(c.new), c.verdict, c.what))
    lines = [visible(f"old: {args.old}"), visible(f"new: {args.new}")]
    lines += [f"{name} differs: {a} -> {b}" for name, a, b in comparison.differences]
    lines += ["", *aligned(rows)] if len(rows) > 1 else []
    for name, only in (("old", comparison.only_old), ("new", comparison.only_new)):
        lines += ["", f"only in {name}:", *(f"  {what}" for what in only)] if only else []
    faster, same = (sum(c.verdict == verdict for c in changes) for verdict in (FASTER, SAME))
    counts = f"{len(changes)} measurements in both: {len(comparison.regressions)} slower, {faster} faster"
    return [*lines, "", f"{counts}, {same} without a change beyond noise (margin {args.margin:.0%})"]
