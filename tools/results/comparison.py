"""Two results of a kind, measurement by measurement: by how much each changed, and which changes are beyond noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dilkit.tools.results.measurements import Measurement
from dilkit.tools.results.statistics import LEAST, Interval, middle, ratio, ratio_interval

Result = dict[str, Any]
COMPARED = ("device_name", "cpu", "cores", "threads", "capability", "cuda", "system", "python", "torch", "numpy", "dilkit")
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


def compare(
    old: Result, new: Result, measured: tuple[dict[str, Measurement], dict[str, Measurement]], margin: float
) -> Comparison:
    """The comparison of two results and what is `measured` in each, matched by what they say they measured."""
    before, after = measured
    changes = [_change(one, after[what], margin) for what, one in before.items() if what in after]
    changes.sort(key=lambda change: (-abs(math.log(change.ratio)), change.what))
    only = [tuple(what for what in one if what not in other) for one, other in ((before, after), (after, before))]
    return Comparison(tuple(changes), *only, tuple(_differences(old, new)))


def _change(old: Measurement, new: Measurement, margin: float) -> Change:
    interval = ratio_interval(new.samples, old.samples)
    verdict = judge(interval, margin) if min(len(old.samples), len(new.samples)) >= LEAST else FEW
    medians = middle(old.samples), middle(new.samples)
    return Change(old.what, *medians, ratio(new.samples, old.samples), interval, YARDSTICK if old.yardstick else verdict)


def judge(interval: Interval, margin: float) -> str:
    """The verdict on a ratio of times with this interval: a change is one if all of the interval is beyond the margin."""
    low, high = interval
    return SLOWER if low > 1 + margin else FASTER if high < 1 / (1 + margin) else SAME


def _differences(old: Result, new: Result) -> Iterator[tuple[str, str, str]]:
    """What else may explain a change: device, versions and problem."""
    pairs = [(name, old["environment"].get(name), new["environment"].get(name)) for name in COMPARED]
    problems = [_problem(result) for result in (old, new)]
    pairs += [(name, *(problem.get(name) for problem in problems)) for name in dict.fromkeys([*problems[0], *problems[1]])]
    return ((name, _shown(a), _shown(b)) for name, a, b in pairs if a != b)


def _problem(result: Result) -> dict[str, Any]:
    """The facts of a result that say what was computed: words, numbers and flags of its problem, and of how it was run."""
    problem = result.get("problem")
    told = dict(problem) if isinstance(problem, dict) else {}
    pattern = told.pop("pattern", None)
    told |= dict(pattern=pattern.get("text")) if isinstance(pattern, dict) else {}
    told |= {name: result[name] for name in ("isa", "suite") if name in result}
    ranks = result.get("ranks")
    told |= {f"ranks: {name}": value for name, value in ranks.items()} if isinstance(ranks, dict) else {}
    return {name: value for name, value in told.items() if isinstance(value, (str, int, float))}


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)
