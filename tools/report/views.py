"""Tables and plots of a suite as data: which rows, what stands in the columns, what is drawn."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dilkit.tools.console.text import UNITS, in_seconds
from dilkit.tools.report.document import Axis, Document, Plot, Point, Table, plots, tables
from dilkit.tools.report.headline import place, placed, revision
from dilkit.tools.report.points import plain, sampled, series_of, speed_up
from dilkit.tools.report.targets import figure_table, number, suite_sentence
from dilkit.tools.results.rows import YARDSTICKS, CaseRows, ResultRow, RowsResult

Measure = Callable[[ResultRow, CaseRows], Point | None]
"""The point of a row: its value with its interval; None where it has none. `x` is filled in by the plot."""


@dataclass(frozen=True)
class Column:
    """A column of a table: its header, and the text of its cell in each row."""

    header: str
    cell: Callable[[ResultRow, CaseRows], str]


def fact(name: str, header: str = "", template: str = "{}") -> Column:
    """Return a column of a fact of the case or of the row; "-" where it has none."""
    return Column(header or name, lambda row, case: _known(row.case.get(name, row.values.get(name)), template.format))


def value(name: str, header: str, unit: str = "number") -> Column:
    """Return a column of a value of the row in a unit of `UNITS`; "-" where it is unknown."""
    return Column(header, lambda row, case: _known(row.values.get(name), UNITS[unit]))


def _known(value: Any, text: Callable[[Any], str]) -> str:
    return "-" if value is None else text(value)


def over(base: str, header: str = "") -> Column:
    """Return a column of the row's time over that of `base` in the same case."""

    def cell(row: ResultRow, case: CaseRows) -> str:
        return f"{case.ratio(row.who, base):.2f}" if case.timed(row.who, base) else "-"

    return Column(header or f"over {base}", cell)


def of(who: str, column: Column, header: str = "") -> Column:
    """Return the column of another implementation in the same case; "-" where it has none."""
    return Column(header or who, lambda row, case: column.cell(case.rows[who], case) if who in case.rows else "-")


WHO = Column("who", lambda row, case: row.who)
TIME = Column("time", lambda row, case: in_seconds(row.median_s))
QUARTILES = Column("quartiles", lambda row, case: " - ".join(map(in_seconds, row.quartiles_s)))
SAMPLES = Column("samples", lambda row, case: str(len(row.samples)))
GFLOPS = Column("GFLOP/s", lambda row, case: number(row.gflops))
OF_MATMUL = Column(
    "of matmul", lambda row, case: f"{row.gflops / case.rows['matmul'].values['gflops']:.0%}" if "matmul" in case.rows else "-"
)


def time(row: ResultRow, case: CaseRows) -> Point | None:
    """Return the median time with its interval."""
    return sampled(row.samples) if row.samples else None


def stored(name: str) -> Measure:
    """Return a measure: a value of the row, without an interval."""
    return lambda row, case: plain("", row.values[name]) if row.values.get(name) is not None else None


def faster(ours: str) -> Measure:
    """Return a measure: the speed-up of `ours` over the row's implementation, with its interval."""

    def measure(row: ResultRow, case: CaseRows) -> Point | None:
        if row.who == ours or not case.timed(row.who, ours):
            return None
        return speed_up(row.samples, case.rows[ours].samples)

    return measure


def times_faster(ours: str, header: str = "speed-up", template: str = "{0.y:.2f}x ({0.low:.2f}x - {0.high:.2f}x)") -> Column:
    """Return a column of the speed-up of `ours` over the row's implementation, with its interval; "-" without times."""

    def cell(row: ResultRow, case: CaseRows) -> str:
        point = faster(ours)(row, case)
        return template.format(point) if point else "-"

    return Column(header, cell)


def speed_up_columns(ours: str) -> tuple[Column, Column]:
    """Return columns of the speed-up of `ours` over the row's implementation, and of its interval."""
    interval = times_faster(ours, "95% interval", "{0.low:.2f}x - {0.high:.2f}x")
    return times_faster(ours, template="{0.y:.1f}x"), interval


@dataclass(frozen=True)
class ResultTable:
    """A table of the rows of the tables `of`, by default of those that were timed; with `who`, of these implementations alone.

    `title` and `note` are templates filled in with the facts of each row; rows with another title stand in another table.
    `spread`: template of a header; the last column becomes one for each such header, and rows alike before it become one.
    """

    title: str
    of: str | tuple[str, ...]
    columns: tuple[Column, ...]
    note: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    timed: bool = True
    who: tuple[str, ...] = ()
    spread: str = ""

    def made(self, result: RowsResult) -> Table:
        """Return the table of a result, under one title."""
        return self._table(self.title, self._rows(result))

    def each(self, result: RowsResult) -> list[Table]:
        titled: dict[str, list[tuple[ResultRow, CaseRows]]] = {}
        for row, case in self._rows(result):
            titled.setdefault(self.title.format(**_facts(row)), []).append((row, case))
        return [self._table(title, rows) for title, rows in titled.items()]

    def _rows(self, result: RowsResult) -> list[tuple[ResultRow, CaseRows]]:
        return [(row, case) for row, case in _rows(result, self) if row.samples or not self.timed]

    def _table(self, title: str, rows: Sequence[tuple[ResultRow, CaseRows]]) -> Table:
        notes = dict.fromkeys(self.note.format(**_facts(row)) for row, _ in rows) if self.note else ()
        header = tuple(column.header for column in self.columns)
        cells = [tuple(column.cell(row, case) for column in self.columns) for row, case in rows]
        if self.spread:
            names = [self.spread.format(**_facts(row)) for row, _ in rows]
            alike: dict[tuple[str, ...], dict[str, str]] = {}
            for (*before, cell), name in zip(cells, names, strict=True):
                alike.setdefault(tuple(before), {})[name] = cell
            header = (*header[:-1], *dict.fromkeys(names))
            cells = [(*before, *(by_name.get(name, "-") for name in dict.fromkeys(names))) for before, by_name in alike.items()]
        return Table(title, header, tuple(cells), "; ".join(notes))


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
    where: Mapping[str, Any] = field(default_factory=dict)
    who: tuple[str, ...] = ()

    def each(self, result: RowsResult) -> list[Plot]:
        titled: dict[str, dict[str, list[Point]]] = {}
        for row, case in _rows(result, self):
            if point := self.measure(row, case):
                facts = _facts(row)
                x = self.x.format(**facts) if self.kind == "bars" else facts[self.x]
                points = titled.setdefault(self.title.format(**facts), {})
                points.setdefault(self.series.format(**facts), []).append(replace(point, x=x))
        drawn = []
        for title, points in titled.items():
            drawn.append(Plot(title, self.kind, series_of(points), self.axes, self.mark))
        return drawn


@dataclass(frozen=True)
class Report:
    """The report of a suite, or of another command that measures.

    Texts are templates, filled in with the facts of the environment and of the result.

    Attributes:
        place, packages: the device, and the versions beside dilkit's, in the headline; `subject`: lines above them.
        tables, plots: views, or functions that make several; tables stand behind that of figures.
        sentences: by name of a figure, the words that docs/measurements.md has for its worst value.
        notes: further lines, behind those on implementations that were not measured.
        summary: function that writes the sentence, of a result that has no figures. `summary_first`: the page begins with it.
        command: that of a run whose headline is the summary behind it, and where it ran, in two lines.
    """

    tables: tuple[ResultTable | Callable[[RowsResult], Iterable[Table]], ...]
    plots: tuple[PlotView | Callable[[RowsResult], Iterable[Plot]], ...] = ()
    place: str = ""
    method: str = ""
    sentences: Mapping[str, str] = field(default_factory=dict)
    notes: Callable[[RowsResult], Iterable[str]] = lambda result: ()
    packages: str = "torch {torch}"
    subject: tuple[str, ...] = ()
    summary: Callable[[RowsResult], str] | None = None
    summary_first: bool = False
    command: str = ""

    def document(self, *results: RowsResult) -> Document:
        return self.made(results[0], figure_table(results[0].figures))

    def made(self, result: RowsResult, figures: Table) -> Document:
        """Return the document of a result, with this table of its figures."""
        return Document(
            headline=self.headline(result),
            tables=tables(figures, *(table for view in self.tables for table in _made(view, result))),
            plots=plots(*(plot for view in self.plots for plot in _made(view, result))),
            notes=self.all_notes(result),
            method=self.method.format(**_run_facts(result)),
        )

    def all_notes(self, result: RowsResult) -> tuple[str, ...]:
        """Return notes on implementations that were not measured, then further ones."""
        return (*([] if self.command else not_measured(result)), *self.notes(result))

    def sentence(self, *results: RowsResult) -> str:
        if self.summary:
            outcome = self.summary(results[0])
            return placed(results[0], outcome) if self.command else outcome
        return suite_sentence(results[0], self.sentences)

    def headline(self, result: RowsResult) -> tuple[str, ...]:
        """Return the lines on what was measured, where, and when."""
        if self.summary and self.command:
            lacking = [f"INTERRUPTED while {result.facts.get('stage')}: this is what there was by then"] * result.interrupted
            return (f"{self.command}: {self.summary(result)}", place(result), *lacking)
        versions = f"{self.packages}, dilkit {{dilkit}}{revision(result.environment)}, {result.date}"
        lines = [template.format(**_run_facts(result)) for template in (*self.subject, self.place, versions)]
        if self.summary and self.summary_first:
            lines.insert(0, self.summary(result))
        if result.quick:
            lines.append(f"QUICK: lengths are 1/{result.quick} of the suite's, and no figure says what the suite's would")
        return (*lines, *["INTERRUPTED: later measurements are missing"] * result.interrupted)


def _run_facts(result: RowsResult) -> dict[str, Any]:
    return vars(result.environment) | result.facts | dict(repeats=result.repeats)


def not_measured(result: RowsResult) -> list[str]:
    """Return reasons why implementations, or their memory, were not measured, each once with its cases by table."""
    places: dict[str, dict[str, list[str]]] = {}
    for row in result.rows:
        where = row.case.get("what") or ", ".join(str(value) for value in row.case.values())
        notes = [f"{row.who} {row.verdict}: {reason}" for reason in row.reasons]
        for note in [*notes, *filter(None, [row.values.get("memory_note")])]:
            places.setdefault(note, {}).setdefault(row.table, []).append(where)
    notes = []
    for note, by_table in places.items():
        listed = (f"{table}: {', '.join(dict.fromkeys(cases))}" for table, cases in by_table.items())
        notes.append(f"{note} ({'; '.join(listed)})")
    return notes


def _made(view: Any, result: RowsResult) -> Iterable[Any]:
    return view.each(result) if isinstance(view, (ResultTable, PlotView)) else view(result)


def _rows(result: RowsResult, view: ResultTable | PlotView) -> Iterator[tuple[ResultRow, CaseRows]]:
    for case in result.cases(*([view.of] if isinstance(view.of, str) else view.of), **view.where):
        for who, row in case.rows.items():
            if who not in YARDSTICKS and (not view.who or who in view.who):
                yield row, case


def _facts(row: ResultRow) -> dict[str, Any]:
    return row.case | row.values | dict(who=row.who)
