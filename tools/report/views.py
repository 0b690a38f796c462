"""Tables and plots of a suite as data: which rows, what stands in the columns, what is drawn.

    REPORT = Report(
        place="{device_name}, {thread_count} threads",
        tables=(TableView("Windows", "windows", (fact("what"), WHO, TIME, over("dilkit"))),),
        plots=(PlotView("Time of a window", "windows", "{what}"),),
        method="Medians of samples taken in turns.",
    )

`Report.document` makes the document of a result, which the renderers turn into text, Markdown, HTML and pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dilkit.tools.console.text import in_seconds
from dilkit.tools.report.document import Axis, Document, Plot, Point, Series, Table, plots, tables
from dilkit.tools.report.headline import suite_headline
from dilkit.tools.report.points import plain, rate, sampled, speed_up
from dilkit.tools.report.targets import figure_table, number, suite_sentence
from dilkit.tools.report.units import UNITS
from dilkit.tools.results.rows import YARDSTICKS, CaseRows, Row, RowsResult

Cell = Callable[[Row, CaseRows], str]
Measure = Callable[[Row, CaseRows], Point | None]
"""The point of a row: its value with its interval; None where it has none. `x` is filled in by the plot."""


@dataclass(frozen=True)
class Column:
    """A column of a table: its header, and the text of its cell in each row."""

    header: str
    cell: Cell


def fact(name: str, header: str = "", template: str = "{}") -> Column:
    """A fact of the case or of the row; "-" where it has none."""

    def cell(row: Row, case: CaseRows) -> str:
        value = row.case.get(name, row.values.get(name))
        return "-" if value is None else template.format(value)

    return Column(header or name, cell)


def label(header: str, template: str) -> Column:
    """Facts of the case filled into `template`, such as "{seq:,} tokens"."""
    return Column(header, lambda row, case: case.label(template))


def value(name: str, header: str, unit: str = "number") -> Column:
    """A value of the row in a unit of `UNITS`; "-" where it is unknown."""

    def cell(row: Row, case: CaseRows) -> str:
        known = row.values.get(name)
        return "-" if known is None else UNITS[unit](known)

    return Column(header, cell)


def over(base: str, header: str = "") -> Column:
    """The row's time over that of `base` in the same case."""

    def cell(row: Row, case: CaseRows) -> str:
        return f"{case.ratio(row.who, base):.2f}" if case.timed(row.who, base) else "-"

    return Column(header or f"over {base}", cell)


WHO = Column("who", lambda row, case: row.who)
TIME = Column("time", lambda row, case: in_seconds(row.median_s))
QUARTILES = Column("quartiles", lambda row, case: " - ".join(map(in_seconds, row.quartiles_s)))
SAMPLES = Column("samples", lambda row, case: str(len(row.samples)))
GFLOPS = Column("GFLOP/s", lambda row, case: number(row.gflops))
OF_MATMUL = Column(
    "of matmul", lambda row, case: f"{row.gflops / case.rows['matmul'].values['gflops']:.0%}" if "matmul" in case.rows else "-"
)


@dataclass(frozen=True)
class TableView:
    """A table of the rows of the tables `of`, by default of those that were timed.

    `note`: a template filled in with the facts of each row, each text once; it stands below the table.
    """

    title: str
    of: str | tuple[str, ...]
    columns: tuple[Column, ...]
    note: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    timed: bool = True

    def made(self, result: RowsResult) -> Table:
        """The table of a result."""
        rows = [(row, case) for row, case in _rows(result, self.of, self.where) if row.samples or not self.timed]
        notes = dict.fromkeys(self.note.format(**(row.case | row.values)) for row, _ in rows) if self.note else ()
        cells = tuple(tuple(column.cell(row, case) for column in self.columns) for row, case in rows)
        return Table(self.title, tuple(column.header for column in self.columns), cells, "; ".join(notes))


def time(row: Row, case: CaseRows) -> Point | None:
    """Median time with its interval."""
    return sampled("", row.samples) if row.samples else None


def gflops(row: Row, case: CaseRows) -> Point | None:
    """Nominal rate in GFLOP/s with its interval."""
    return rate("", row.values["flops"] / 1e9, row.samples) if row.samples and row.values.get("flops") else None


def stored(name: str) -> Measure:
    """A value of the row, without an interval."""
    return lambda row, case: plain("", row.values[name]) if row.values.get(name) is not None else None


def faster(ours: str) -> Measure:
    """Speed-up of `ours` over the row's implementation, with its interval."""

    def measure(row: Row, case: CaseRows) -> Point | None:
        if row.who == ours or not case.timed(row.who, ours):
            return None
        return speed_up("", row.samples, case.rows[ours].samples)

    return measure


SECONDS, BYTES = Axis("time", "seconds"), Axis("memory", "bytes")
NAMES, TOKENS, TIMES = Axis("", "number"), Axis("tokens", "tokens"), Axis("times faster", "times")


@dataclass(frozen=True)
class PlotView:
    """A plot of the rows of the tables `of`, a series for each `series`, by default for each implementation.

    `x`: a template of a bar's label, or the name of the fact along the first axis of lines and points.
    """

    title: str
    of: str | tuple[str, ...]
    x: str
    measure: Measure = time
    axes: tuple[Axis, Axis] = (NAMES, SECONDS)
    kind: Literal["lines", "points", "bars"] = "bars"
    series: str = "{who}"
    mark: float | None = None
    dashed: tuple[str, ...] = ()
    where: Mapping[str, Any] = field(default_factory=dict)

    def made(self, result: RowsResult) -> Plot:
        """The plot of a result."""
        points: dict[str, list[Point]] = {}
        for row, case in _rows(result, self.of, self.where):
            if point := self.measure(row, case):
                facts = row.case | row.values | dict(who=row.who)
                x = self.x.format(**facts) if self.kind == "bars" else facts[self.x]
                points.setdefault(self.series.format(**facts), []).append(Point(x, point.y, point.low, point.high))
        series = tuple(Series(name, tuple(drawn), dashed=name in self.dashed) for name, drawn in points.items())
        return Plot(self.title, self.kind, series, self.axes, self.mark)


@dataclass(frozen=True)
class Report:
    """All that a result says.

    Attributes:
        place: template of the first line, filled in with the facts of the environment and of the result.
        tables: behind that of figures; a function makes several, or one whose columns depend on the rows.
        plots: likewise.
        method: template of how it was measured, filled in as `place` is.
        sentences: by name of a figure, the words that docs/measurements.md has for its worst value.
        notes: further lines, behind those on implementations that were not measured.
        figure_columns: values of figures with a column each, such as "head_dim 64".
        headline: options of `suite_headline`.
        subject: templates of lines above the place.
        summary: function that writes the sentence, of a result that has no figures.
    """

    place: str
    tables: tuple[TableView | Callable[[RowsResult], Iterable[Table]], ...]
    plots: tuple[PlotView | Callable[[RowsResult], Iterable[Plot]], ...] = ()
    method: str = ""
    sentences: Mapping[str, str] = field(default_factory=dict)
    notes: Callable[[RowsResult], Iterable[str]] = lambda result: ()
    figure_columns: tuple[str, ...] = ()
    headline: Mapping[str, str] = field(default_factory=dict)
    subject: tuple[str, ...] = ()
    summary: Callable[[RowsResult], str] | None = None

    def document(self, result: RowsResult) -> Document:
        """The document of `result`."""
        facts = vars(result.environment) | result.facts | dict(repeats=result.repeats)
        lines = [template.format(**facts) for template in self.subject]
        options = {name: template.format(**facts) for name, template in self.headline.items()}
        made_tables = [table for view in self.tables for table in _made(view, result)]
        return Document(
            headline=(*lines, *suite_headline(result, self.place.format(**facts), **options)),
            tables=tables(figure_table(result.figures, self.figure_columns), *made_tables),
            plots=plots(*(plot for view in self.plots for plot in _made(view, result))),
            notes=(*not_measured(result), *self.notes(result)),
            method=self.method.format(**facts),
        )

    def sentence(self, result: RowsResult) -> str:
        """The sentence on docs/measurements.md."""
        return self.summary(result) if self.summary else suite_sentence(result, self.sentences)


def not_measured(result: RowsResult) -> list[str]:
    """Reasons why implementations, or their memory, were not measured, each once with the cases that it holds for."""
    places: dict[str, list[str]] = {}
    for row in result.rows:
        where = f"{row.table}: {', '.join(str(value) for value in row.case.values())}"
        notes = [f"{row.who} {row.verdict}: {reason}" for reason in row.reasons]
        for note in [*notes, *filter(None, [row.values.get("memory_note")])]:
            places.setdefault(note, []).append(where)
    return [f"{note} ({', '.join(dict.fromkeys(cases))})" for note, cases in places.items()]


def _made(view: Any, result: RowsResult) -> Iterable[Any]:
    return [view.made(result)] if isinstance(view, (TableView, PlotView)) else view(result)


def _rows(result: RowsResult, of: str | tuple[str, ...], where: Mapping[str, Any]) -> Iterator[tuple[Row, CaseRows]]:
    """Rows of implementations with their cases, yardsticks left out."""
    for case in result.cases(*([of] if isinstance(of, str) else of), **where):
        yield from ((row, case) for who, row in case.rows.items() if who not in YARDSTICKS)
