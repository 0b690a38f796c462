"""Points and series of plots, made of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from dilkit.tools.report.document import Point, Series
from dilkit.tools.results.statistics import median_interval, ratio, ratio_interval


def plain(x: float | str, y: float) -> Point:
    """Return a point without an interval."""
    return Point(x, y, y, y)


def sampled(x: float | str, samples: Sequence[float]) -> Point:
    """Return the median of `samples`, with its bootstrap interval."""
    return Point(x, median(samples), *median_interval(samples))


def speed_up(label: str, slow: Sequence[float], fast: Sequence[float]) -> Point:
    """Return a bar: the ratio of `slow` to `fast`, with its bootstrap interval."""
    return Point(label, ratio(slow, fast), *ratio_interval(slow, fast))


def series_of(points: Mapping[str, Sequence[Point]]) -> tuple[Series, ...]:
    """Return a series for each name."""
    return tuple(Series(name, tuple(of_name)) for name, of_name in points.items())
