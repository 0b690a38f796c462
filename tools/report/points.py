"""Points and series of plots, made of samples."""

from collections.abc import Mapping, Sequence
from statistics import median

from dilkit.tools.report.document import Point, Series
from dilkit.tools.results.statistics import median_interval, ratio_interval


def plain(x: float | str, y: float) -> Point:
    return Point(x, y, y, y)


def sampled(samples: Sequence[float]) -> Point:
    """Return the median of `samples`, with its bootstrap interval."""
    return Point("", median(samples), *median_interval(samples))


def speed_up(slow: Sequence[float], fast: Sequence[float]) -> Point:
    """Return the ratio of medians of `slow` and `fast`, with its bootstrap interval."""
    return Point("", median(slow) / median(fast), *ratio_interval(slow, fast))


def series_of(points: Mapping[str, Sequence[Point]]) -> tuple[Series, ...]:
    return tuple(Series(name, tuple(of_name)) for name, of_name in points.items())
