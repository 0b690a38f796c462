"""A document: what a result says, as plain values, which renderers turn into text, Markdown, HTML and pictures."""

from dataclasses import dataclass, replace
from typing import Literal

Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table: every row has as many cells as `header`. `note` stands below it."""

    title: str
    header: Row
    rows: tuple[Row, ...]
    note: str = ""


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
    """An axis: its title, and the unit in which its numbers are written (see `UNITS`)."""

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
class Document:
    """A result: what was measured, where and when; tables and plots, the most important first; how it was measured."""

    headline: tuple[str, ...]
    tables: tuple[Table, ...]
    plots: tuple[Plot, ...] = ()
    notes: tuple[str, ...] = ()
    method: str = ""


@dataclass(frozen=True)
class Section:
    """A result in a report: the name of its file, its kind, the command that wrote it, and its document."""

    name: str
    kind: str
    command: str
    document: Document


def plots(*made: Plot) -> tuple[Plot, ...]:
    """Return plots that have something to show, each without its empty series."""
    filled = [replace(plot, series=tuple(series for series in plot.series if series.points)) for plot in made]
    return tuple(plot for plot in filled if any(not series.dashed for series in plot.series))


def tables(*made: Table) -> tuple[Table, ...]:
    return tuple(table for table in made if table.rows)
