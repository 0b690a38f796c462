"""The report of a run that trains or judges something: its outcome in a sentence, tables, plots, and how it was done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dilkit.tools.report.document import Document, Plot, Table, plots, tables
from dilkit.tools.report.headline import place, placed
from dilkit.tools.results.rows import RowsResult

T = TypeVar("T")
MOST_POINTS = 200
"""Points of a curve that are drawn: a step more or less is not seen."""


@dataclass(frozen=True)
class RunReport:
    """The report of one kind of run.

    Attributes:
        command: words that the headline begins with, such as "dilkit demo".
        outcome: function that returns the sentence of the headline and of docs/measurements.md.
        tables: function that returns the tables, the most important one first; `plots` and `notes`: likewise.
        method: template of how it was done, filled in with the facts of the result.
    """

    command: str
    outcome: Callable[[RowsResult], str]
    tables: Callable[[RowsResult], Iterable[Table]]
    plots: Callable[[RowsResult], Iterable[Plot]]
    method: str
    notes: Callable[[RowsResult], Iterable[str]] = lambda result: ()

    def document(self, result: RowsResult) -> Document:
        """The document of `result`; an interrupted run says so in its headline."""
        lacking = [f"INTERRUPTED while {result.facts.get('stage')}: this is what there was by then"] * result.interrupted
        return Document(
            headline=(f"{self.command}: {self.outcome(result)}", place(result), *lacking),
            tables=tables(*self.tables(result)),
            plots=plots(*self.plots(result)),
            notes=tuple(self.notes(result)),
            method=self.method.format(**result.facts),
        )

    def sentence(self, result: RowsResult) -> str:
        """The sentence on docs/measurements.md."""
        return placed(result, self.outcome(result))


def thinned(items: Sequence[T], most: int = MOST_POINTS) -> tuple[T, ...]:
    """At most `most` of the items in equal steps, and the last one.

    >>> thinned(range(10), 4)
    (0, 3, 6, 9)
    """
    step = -(-len(items) // most) or 1
    return (*items[::step], *(items[-1:] if (len(items) - 1) % step else ()))
