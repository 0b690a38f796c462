"""Points and series of plots, made of samples; notes with their places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dilkit.tools.report.document import Point, Series
from dilkit.tools.results.statistics import median_interval, middle, ratio, ratio_interval


def plain(x: float | str, y: float) -> Point:
    """Return a point without an interval."""
    return Point(x, y, y, y)


def sampled(x: float | str, samples: Sequence[float]) -> Point:
    """Return the median of `samples`, with its bootstrap interval."""
    return Point(x, middle(samples), *median_interval(samples))


def rate(x: float | str, amount: float, samples: Sequence[float]) -> Point:
    """Return `amount` over the median of `samples`, which are times, with the interval that follows from theirs."""
    low, high = median_interval(samples)
    return Point(x, amount / middle(samples), amount / high, amount / low)


def speed_up(label: str, slow: Sequence[float], fast: Sequence[float]) -> Point:
    """Return a bar: the ratio of `slow` to `fast`, with its bootstrap interval."""
    return Point(label, ratio(slow, fast), *ratio_interval(slow, fast))


def series_of(points: Mapping[str, Sequence[Point]]) -> tuple[Series, ...]:
    """Return a series for each name."""
    return tuple(Series(name, tuple(of_name)) for name, of_name in points.items())


def grouped(notes: Iterable[tuple[str, str]], places: str = "({})") -> list[str]:
    """Return each note once, with all its places."""
    by_note: dict[str, list[str]] = {}
    for note, place in notes:
        by_note.setdefault(note, []).append(place)
    return [f"{note} {places.format(', '.join(dict.fromkeys(where)))}" for note, where in by_note.items()]
