"""Figures beside their targets: the table of them, and the sentence that docs/measurements.md has of a suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dilkit.tools.console.text import UNITS
from dilkit.tools.report.document import Table
from dilkit.tools.report.headline import placed
from dilkit.tools.results.rows import Figure, RowsResult

SHOWN = 4
"""The most values that are all shown; of more the worst is."""


def figure_table(figures: Sequence[Figure], columns: Sequence[str] = ()) -> Table:
    """Return every figure with its limits, its values and its verdict.

    `columns` names values that have a column each, such as head_dim; without them the worst value stands in one.
    """
    aims = any(figure.aim is not None for figure in figures)
    header = ("figure", "must", *(("aim",) if aims else ()), *(columns or ("measured",)), "verdict")
    return Table("Figures beside their targets", header, tuple(_row(figure, columns, aims) for figure in figures))


def machine_table(machines: Mapping[str, Sequence[Figure]], note: str) -> Table:
    """Return every figure with its limits; a column for each machine has the worst value with its verdict."""
    columns = {name: {figure.name: figure for figure in figures} for name, figures in machines.items()}
    every = {name: figure for column in columns.values() for name, figure in column.items()}
    rows = []
    for name, figure in every.items():
        limits = _limit(figure, figure.must), _limit(figure, figure.aim)
        rows.append((name, *limits, *(_judged(column.get(name)) for column in columns.values())))
    return Table("Figures beside their targets", ("figure", "must", "aim", *machines), tuple(rows), note)


def _judged(figure: Figure | None) -> str:
    """Return the worst value with its case, and the verdict."""
    if figure is None or not figure.values:
        return figure.verdict if figure else "not measured"
    what, value = (max if figure.lower else min)(figure.values.items(), key=lambda item: item[1])
    return f"{_shown(figure, value)}{f' ({what})' * bool(what)}: {figure.verdict}"


def _row(figure: Figure, columns: Sequence[str], aims: bool) -> tuple[str, ...]:
    limits = (_limit(figure, figure.must), *((_limit(figure, figure.aim),) if aims else ()))
    values = [_shown(figure, figure.values.get(name.split()[-1])) for name in columns] or [_listed(figure)]
    return (figure.name, *limits, *values, figure.verdict)


def _limit(figure: Figure, value: float | None) -> str:
    return "-" if value is None else f"{'at most' if figure.lower else 'at least'} {number(value)}{figure.unit}"


def _shown(figure: Figure, value: float | None) -> str:
    return "-" if value is None else f"{number(value)}{figure.unit}"


def _listed(figure: Figure) -> str:
    """Return all values where they are few, else the worst, each with its case."""
    values = sorted(figure.values.items(), key=lambda item: item[1], reverse=figure.lower)
    shown = [f"{_shown(figure, value)}{f' ({what})' * bool(what)}" for what, value in values]
    return ", ".join(shown if len(shown) <= SHOWN else [f"{shown[0]}, the worst of {len(shown)}"]) or "-"


number = UNITS["number"]
"""Three digits of a number, or the whole ones."""


def suite_sentence(result: RowsResult, words: Mapping[str, str], where: str = "") -> str:
    """Return sentences of the figures named in `words`, and the number of targets met; `where`, by default on which device."""
    figures = {figure.name: figure for figure in result.figures}
    pairs = [(words[name], figures[name]) for name in words if name in figures]
    parts = [text.format(_shown(figure, figure.worst)) for text, figure in pairs if figure.worst is not None]
    verdicts = [figure.verdict for figure in result.figures]
    met, short = sum(verdict in ("met", "aim met") for verdict in verdicts), verdicts.count("short")
    others = len(verdicts) - met - short
    missed = [f"{count} {what}" for count, what in ((short, "not"), (others, "not measured")) if count]
    return placed(result, "; ".join([*parts, ", ".join([f"{met} of {len(verdicts)} targets met", *missed])]), where)
