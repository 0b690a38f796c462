"""What a result says, as plain values: tables, plots, and lines of text. Renderers turn them into text, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dilkit.tools.console.text import in_bytes, in_seconds, in_thousands
from dilkit.tools.results.statistics import median_interval, middle, ratio, ratio_interval

Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table: every row has as many cells as `header`. `note` stands below it."""

    title: str
    header: Row
    rows: tuple[Row, ...]
    note: str = ""

    @classmethod
    def of(cls, title: str, rows: Iterable[Sequence[str]], note: str = "") -> Table:
        """The first row is the header; cells are without the backticks that mark code in Markdown."""
        header, *rest = (tuple(cell.strip("`") for cell in row) for row in rows)
        return cls(title, header, tuple(rest), note)


@dataclass(frozen=True)
class Point:
    """A point of a plot, or a bar: where it stands (a number, or a bar's label), its value, and the interval around that."""

    x: float | str
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Series:
    """Points that belong together. A `dashed` one is no measurement but what measurements are compared with."""

    name: str
    points: tuple[Point, ...]
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """What an axis shows: its title, and the unit in which its numbers are written (see `UNITS`)."""

    title: str
    unit: str
    log: bool = True


@dataclass(frozen=True)
class Plot:
    """A plot of kind "lines" (points joined), "points" (not joined) or "bars" (lying, one a label, `mark` the line to beat)."""

    title: str
    kind: Literal["lines", "points", "bars"]
    series: tuple[Series, ...]
    axes: tuple[Axis, Axis]
    mark: float | None = None


@dataclass(frozen=True)
class Told:
    """A result as a whole: what and where in a few lines, its tables and plots, what they leave out, and how it was measured."""

    headline: tuple[str, ...]
    tables: tuple[Table, ...]
    plots: tuple[Plot, ...] = ()
    notes: tuple[str, ...] = ()
    method: str = ""


UNITS: dict[str, Callable[[float], str]] = {
    "bytes": lambda value: in_bytes(round(value)),
    "gflops": lambda value: f"{value:,.3g} GFLOP/s" if value < 1000 else f"{value / 1000:,.3g} TFLOP/s",
    "kb": lambda value: f"{value:,.3g} kB",
    "number": lambda value: f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}",
    "seconds": in_seconds,
    "times": lambda value: f"{value:,.3g}x" if value < 1000 else f"{value:,.0f}x",
    "tokens": lambda value: f"{value / 1024:,.0f}K" if value >= 1024 and value % 1024 == 0 else in_thousands(value),
}
"""How numbers are written, by unit."""


def plain(x: float | str, y: float) -> Point:
    """A point without an interval."""
    return Point(x, y, y, y)


def sampled(x: float | str, samples: Sequence[float]) -> Point:
    """The median of `samples`, with its bootstrap interval."""
    return Point(x, middle(samples), *median_interval(samples))


def rate(x: float | str, amount: float, samples: Sequence[float]) -> Point:
    """`amount` over the median of `samples`, which are times, with the interval that follows from theirs."""
    low, high = median_interval(samples)
    return Point(x, amount / middle(samples), amount / high, amount / low)


def speed_up(label: str, slow: Sequence[float], fast: Sequence[float]) -> Point:
    """A bar: how many times faster `fast` is than `slow`, with the bootstrap interval of that ratio."""
    return Point(label, ratio(slow, fast), *ratio_interval(slow, fast))


def series_of(points: Mapping[str, Sequence[Point]]) -> tuple[Series, ...]:
    """A series for each name."""
    return tuple(Series(name, tuple(found)) for name, found in points.items())


def roof(title: str, gflops: Sequence[float], along: Sequence[float]) -> Series:
    """A ceiling of a roofline: the median of what was measured, from end to end."""
    ends = (min(along), max(along)) if along else ()
    return Series(title, tuple(plain(x, middle(gflops)) for x in ends), dashed=True)


def plots(*made: Plot) -> tuple[Plot, ...]:
    """Those that have something to show, each without its empty series."""
    filled = [Plot(p.title, p.kind, tuple(s for s in p.series if s.points), p.axes, p.mark) for p in made]
    return tuple(plot for plot in filled if any(not series.dashed for series in plot.series))


def tables(*made: Table) -> tuple[Table, ...]:
    """Those that have rows."""
    return tuple(table for table in made if table.rows)


@dataclass(frozen=True)
class Section:
    """A result in a report: the name of its file, its kind, the command that wrote it, and what it says."""

    name: str
    kind: str
    command: str
    told: Told
