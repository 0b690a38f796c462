"""The table of orders of backends, and what it comes to on every known device for every dtype: `dilkit info --all`."""

from __future__ import annotations

import string
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dilkit.device import GENERATIONS, Device
from dilkit.problem import DTYPES, Problem
from dilkit.selection.preference import BY_DESIGN, PreferenceRow
from dilkit.selection.preference_table import TABLE, row_of
from dilkit.selector import Trace, explain
from dilkit.tools.commands.info.facts import Failure, guarded
from dilkit.tools.console.text import table
from dilkit.tools.results.decode import encode

_LABEL = 34
"""Characters of a device's name, at most."""


@dataclass(frozen=True)
class Cell:
    """The problem on one device in one dtype. `row` is the number of the table's row that decided; None: another reason did."""

    label: str
    dtype: str
    trace: Trace | Failure
    row: int | None

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        where = dict(label=self.label, dtype=self.dtype)
        return where | (encode(self.trace) if isinstance(self.trace, Failure) else dict(self.trace.to_dict(), row=self.row))


def orders() -> list[dict[str, Any]]:
    """The rows of the table as plain data, numbered from 1 on."""
    return [dict(number=number, **row.to_dict()) for number, row in enumerate(TABLE, 1)]


def matrix(problem: Problem, here: Iterable[Device], backend: Sequence[str] | None) -> list[Cell]:
    """The trace of `problem`, on the devices `here` and on one of each generation, for each dtype."""
    devices = [*here, *(Device.assume("sm_{}{}".format(*generation.capability)) for generation in GENERATIONS)]
    return [_judged(replace(problem, device=device, dtype=dtype), backend) for device in devices for dtype in DTYPES]


def _judged(problem: Problem, backend: Sequence[str] | None) -> Cell:
    trace, row, device = guarded(partial(explain, problem, backend)), row_of(problem), problem.device
    decided = row and isinstance(trace, Trace) and trace.picked and trace.why == row.preference.why(trace.picked)
    kind = device.type if device.capability is None else "sm_{}{}".format(*device.capability)
    where = "" if device.assumed or device.type == "cpu" else f" {device.type}:{device.index}"
    label = textwrap.shorten(f"{kind}{where} {device.name}", _LABEL, placeholder="...")
    return Cell(label, problem.dtype, trace, TABLE.index(row) + 1 if row and decided else None)


def lines(cells: Sequence[Cell]) -> list[str]:
    """Who is picked where, each with the number of the row that decided, and the rows; other reasons have letters."""
    why = dict.fromkeys(str(c.trace.why) for c in cells if isinstance(c.trace, Trace) and c.trace.picked and not c.row)
    letters = dict(zip(why, string.ascii_letters, strict=False))
    by_device: dict[str, list[str]] = {}
    for cell in cells:
        by_device.setdefault(cell.label, []).append(_shown(cell, letters))
    shown = table([("", *DTYPES), *((label, *found) for label, found in by_device.items())])
    shown += table(dict.fromkeys((cell.trace.error,) for cell in cells if isinstance(cell.trace, Failure)))
    shown += table(dict.fromkeys(_missing(cell.trace for cell in cells if isinstance(cell.trace, Trace))))
    if letters:
        shown += ["", "picked for other reasons than the table's", *table((letter, reason) for reason, letter in letters.items())]
    head = f"the table of orders; the first row that fits decides. Of GPUs it holds {BY_DESIGN}, where no measurement is named"
    return [*shown, "", *table([(head,)], indent=0), *table((str(i), _of_row(row)) for i, row in enumerate(TABLE, 1))]


def _missing(traces: Iterable[Trace]) -> Iterator[tuple[str, str]]:
    """Backends that could be picked if they were installed whole, and what is not."""
    for decision in (d for trace in traces for d in trace.decisions if d.verdict == "refused"):
        yield from ((decision.name, reason) for reason in decision.reasons if reason.startswith("module "))


def _of_row(row: PreferenceRow) -> str:
    basis = "" if row.basis == BY_DESIGN else f" ({row.basis})"
    return f"{row.where}: {', '.join(row.order)}\n{row.why}{basis}"


def _shown(cell: Cell, letters: dict[str, str]) -> str:
    if isinstance(cell.trace, Failure):
        return "?"
    return f"{cell.trace.picked} {cell.row or letters[str(cell.trace.why)]}" if cell.trace.picked else "none"
