"""Figures beside their targets: the table of them, and the sentence that docs/measurements.md has of a suite."""

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


def figure_table(figures: Sequence[Figure]) -> Table:
    """Return every figure with its limits, its values, or the worst of many, and its verdict."""
    limits = ("must", "aim") if any(figure.aim is not None for figure in figures) else ("must",)
    rows = tuple((one.name, *(limit(one, name) for name in limits), _listed(one), one.verdict) for one in figures)
    return Table(TITLE, ("figure", *limits, "measured", "verdict"), rows)


def suite_sentence(result: RowsResult, words: Mapping[str, str], where: str = "") -> str:
    """Return sentences of the figures named in `words`, and the number of targets met; `where`, by default on which device."""
    figures = {figure.name: figure for figure in result.figures}
    pairs = [(words[name], figures[name]) for name in words if name in figures]
    parts = [text.format(_shown(figure, figure.worst)) for text, figure in pairs if figure.worst is not None]
    verdicts = [figure.verdict for figure in result.figures]
    met, short = sum(verdict in ("met", "aim met") for verdict in verdicts), verdicts.count("short")
    missed = [f"{count} {what}" for count, what in ((short, "not"), (len(verdicts) - met - short, "not measured")) if count]
    return placed(result, "; ".join([*parts, ", ".join([f"{met} of the suite's {len(verdicts)} targets met", *missed])]), where)


def _listed(figure: Figure) -> str:
    shown = worst_first(figure)
    return ", ".join(shown if len(shown) <= SHOWN else [f"{shown[0]}, the worst of {len(shown)}"]) or "-"


def worst_first(figure: Figure) -> list[str]:
    values = sorted(figure.values.items(), key=lambda item: item[1], reverse=figure.lower)
    return [f"{_shown(figure, value)}{f' ({what})' * bool(what)}" for what, value in values]


def limit(figure: Figure, name: str) -> str:
    """Return a limit in words, "-" where there is none."""
    value = getattr(figure, name)
    return "-" if value is None else f"{'at most' if figure.lower else 'at least'} {_shown(figure, value)}"


def _shown(figure: Figure, value: float | None) -> str:
    return "-" if value is None else f"{number(value)}{figure.unit}"
