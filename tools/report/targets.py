"""Figures beside their targets: the table of them, and the sentence that docs/measurements.md has of a suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dilkit.tools.console.text import UNITS
from dilkit.tools.report.document import Table
from dilkit.tools.report.headline import placed
from dilkit.tools.results.rows import Figure, RowsResult

TITLE = "Figures beside their targets"
SHOWN = 4
"""The most values that are all shown; of more the worst is."""
number = UNITS["number"]
"""Three digits of a number, or the whole ones."""


def figure_table(figures: Sequence[Figure], columns: Sequence[str] = ()) -> Table:
    """Return every figure with its limits, its values and its verdict.

    `columns` names values that have a column each, such as head_dim; without them all values, or the worst, stand in one.
    """
    limits = ("must", "aim") if any(figure.aim is not None for figure in figures) else ("must",)
    rows = []
    for figure in figures:
        values = [_shown(figure, figure.values.get(name.split()[-1])) for name in columns] or [_listed(figure)]
        rows.append((figure.name, *(_limit(figure, name) for name in limits), *values, figure.verdict))
    return Table(TITLE, ("figure", *limits, *(columns or ("measured",)), "verdict"), tuple(rows))


def machine_table(machines: Mapping[str, Sequence[Figure]], note: str) -> Table:
    """Return every figure with its limits; a column for each machine has the worst value with its verdict."""
    columns = [{figure.name: figure for figure in figures} for figures in machines.values()]
    every = {name: figure for column in columns for name, figure in column.items()}
    rows = []
    for name, figure in every.items():
        cells = [_judged(column.get(name)) for column in columns]
        rows.append((name, _limit(figure, "must"), _limit(figure, "aim"), *cells))
    return Table(TITLE, ("figure", "must", "aim", *machines), tuple(rows), note)


def suite_sentence(result: RowsResult, words: Mapping[str, str], where: str = "") -> str:
    """Return sentences of the figures named in `words`, and the number of targets met; `where`, by default on which device."""
    figures = {figure.name: figure for figure in result.figures}
    pairs = [(words[name], figures[name]) for name in words if name in figures]
    parts = [text.format(_shown(figure, figure.worst)) for text, figure in pairs if figure.worst is not None]
    verdicts = [figure.verdict for figure in result.figures]
    met, short = sum(verdict in ("met", "aim met") for verdict in verdicts), verdicts.count("short")
    missed = [f"{count} {what}" for count, what in ((short, "not"), (len(verdicts) - met - short, "not measured")) if count]
    return placed(result, "; ".join([*parts, ", ".join([f"{met} of {len(verdicts)} targets met", *missed])]), where)


def _judged(figure: Figure | None) -> str:
    if figure is None or not figure.values:
        return figure.verdict if figure else "not measured"
    return f"{_worst_first(figure)[0]}: {figure.verdict}"


def _listed(figure: Figure) -> str:
    shown = _worst_first(figure)
    return ", ".join(shown if len(shown) <= SHOWN else [f"{shown[0]}, the worst of {len(shown)}"]) or "-"


def _worst_first(figure: Figure) -> list[str]:
    """Return all values, each with its case."""
    values = sorted(figure.values.items(), key=lambda item: item[1], reverse=figure.lower)
    return [f"{_shown(figure, value)}{f' ({what})' * bool(what)}" for what, value in values]


def _limit(figure: Figure, name: str) -> str:
    value = getattr(figure, name)
    return "-" if value is None else f"{'at most' if figure.lower else 'at least'} {_shown(figure, value)}"


def _shown(figure: Figure, value: float | None) -> str:
    return "-" if value is None else f"{number(value)}{figure.unit}"
