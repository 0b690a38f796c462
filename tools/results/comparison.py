"""Two results of a kind, measurement by measurement: by how much each changed, and which changes are beyond noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dilkit.tools.results.record import Measurement, Result
from dilkit.tools.results.statistics import LEAST, Interval, middle, ratio, ratio_interval

COMPARED = ("device_name", "cpu", "cores", "threads", "capability", "cuda", "system", "python", "torch", "numpy", "dilkit")
"""Facts of the environment that explain a change."""
SLOWER, FASTER, SAME, YARDSTICK, FEW = "slower", "faster", "no change beyond noise", "yardstick", "too few samples to tell"


@dataclass(frozen=True)
class Measured:
    """What a result measured, by what it says of each measurement, and the facts that explain a change."""

    kind: str
    quick: int
    facts: dict[str, str]
    found: dict[str, Measurement]

    @classmethod
    def of(cls, result: Result) -> Measured:
        """What the record of a result says it measured."""
        known = {name: getattr(result.environment, name) for name in COMPARED}
        facts = {name: str(value) for name, value in known.items() if value is not None} | result.problem_facts()
        return cls(result.kind, int(getattr(result, "quick", 0)), facts, {one.what: one for one in result.measurements()})


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
    """All changes, the largest first; what only one of the files measures; what else they differ in: (what, old, new)."""

    changes: tuple[Change, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]
    differences: tuple[tuple[str, str, str], ...]

    @property
    def regressions(self) -> tuple[Change, ...]:
        """What got slower beyond noise."""
        return tuple(change for change in self.changes if change.verdict == SLOWER)


def compare(old: Measured, new: Measured, margin: float) -> Comparison:
    """The comparison of two results, whose measurements are matched by what they say they measured."""
    before, after = old.found, new.found
    changes = [_change(one, after[what], margin) for what, one in before.items() if what in after]
    changes.sort(key=lambda change: (-abs(math.log(change.ratio)), change.what))
    gone, fresh = (tuple(what for what in one if what not in other) for one, other in ((before, after), (after, before)))
    return Comparison(tuple(changes), gone, fresh, tuple(_differences(old.facts, new.facts)))


def _change(old: Measurement, new: Measurement, margin: float) -> Change:
    interval = ratio_interval(new.samples, old.samples)
    verdict = judge(interval, margin) if min(len(old.samples), len(new.samples)) >= LEAST else FEW
    medians = middle(old.samples), middle(new.samples)
    return Change(old.what, *medians, ratio(new.samples, old.samples), interval, YARDSTICK if old.yardstick else verdict)


def judge(interval: Interval, margin: float) -> str:
    """The verdict on a ratio of times with this interval: a change is one if all of the interval is beyond the margin."""
    low, high = interval
    return SLOWER if low > 1 + margin else FASTER if high < 1 / (1 + margin) else SAME


def _differences(old: dict[str, str], new: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """What else may explain a change: device, versions and problem."""
    pairs = ((name, old.get(name, "-"), new.get(name, "-")) for name in dict.fromkeys([*old, *new]))
    return (pair for pair in pairs if pair[1] != pair[2])
