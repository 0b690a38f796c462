"""The table of orders of backends, and what it comes to on every known device for every dtype: `dilkit info --all`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from dilkit.device import GENERATIONS, Device
from dilkit.problem import DTYPES, Problem
from dilkit.selection.preference import BY_DESIGN
from dilkit.selection.table import TABLE, row_of
from dilkit.selector import explain
from dilkit.tools.commands.info.facts import failure, guarded
from dilkit.tools.console.text import grid, table

_LABEL = 34
"""Characters of a device's name, at most."""

Report = dict[str, Any]


def orders() -> list[Report]:
    """The rows of the table as plain data, numbered from 1 on."""
    return [dict(number=number, **row.to_dict()) for number, row in enumerate(TABLE, 1)]


def matrix(problem: Problem, here: Iterable[Device], backend: Sequence[str] | None) -> list[Report]:
    """The trace of `problem`, on the devices `here` and on one of each generation, for each dtype.

    "row" is the number of the table's row that decided; None where another reason did. A failed probe is `{"error": text}`.
    """
    devices = [*here, *(Device.assume("sm_{}{}".format(*generation.capability)) for generation in GENERATIONS)]
    posed = [replace(problem, device=device, dtype=dtype) for device in devices for dtype in DTYPES]
    return [dict(label=_label(p.device), dtype=p.dtype, **guarded(lambda p=p: _judged(p, backend))) for p in posed]


def _judged(problem: Problem, backend: Sequence[str] | None) -> Report:
    trace, row = explain(problem, backend), row_of(problem)
    by_table = row is not None and trace.picked is not None and trace.why == row.preference.why(trace.picked)
    return dict(trace.to_dict(), row=TABLE.index(row) + 1 if row is not None and by_table else None)


def _label(device: Device) -> str:
    kind = device.type if device.capability is None else "sm_{}{}".format(*device.capability)
    where = "" if device.assumed or device.type == "cpu" else f" {device.type}:{device.index}"
    text = f"{kind}{where} {device.name}"
    return text if len(text) <= _LABEL else f"{text[: _LABEL - 3]}..."


def lines(judged: list[Report], rows: list[Report]) -> list[str]:
    """Who is picked where, each with the number of the row that decided, and the rows; other reasons have letters."""
    notes = list(dict.fromkeys(r["why"] for r in judged if not failure(r) and r["picked"] and not r["row"]))
    cells: dict[str, list[str]] = {}
    for r in judged:
        cells.setdefault(r["label"], []).append(_cell(r, notes))
    shown = grid("", DTYPES, list(cells.items()))
    failures = list(dict.fromkeys(failure(r) for r in judged if failure(r)))
    shown += [f"  {text}" for text in failures]
    shown += table(dict.fromkeys(_missing(judged)))
    if notes:
        shown += ["", "picked for other reasons than the table's", *table((_letter(i), why) for i, why in enumerate(notes))]
    head = f"the table of orders; the first row that fits decides. Of GPUs it holds {BY_DESIGN}: nothing was measured there"
    return [*shown, "", *table([(head,)], indent=0), *table(_row(row) for row in rows)]


def _missing(judged: list[Report]) -> Iterator[tuple[str, str]]:
    """Backends that could be picked if they were installed whole, and what is not."""
    for backend in (b for r in judged if not failure(r) for b in r["backends"] if b["verdict"] == "refused"):
        yield from ((backend["name"], reason) for reason in backend["reasons"] if reason.startswith("module "))


def _row(row: Report) -> tuple[str, str]:
    basis = "" if row["basis"] == BY_DESIGN else f" ({row['basis']})"
    return str(row["number"]), f"{row['where']}: {', '.join(row['order'])}\n{row['why']}{basis}"


def _cell(judged: Report, notes: list[str]) -> str:
    if failure(judged):
        return "?"
    if not judged["picked"]:
        return "none"
    return f"{judged['picked']} {judged['row'] or _letter(notes.index(judged['why']))}"


def _letter(i: int) -> str:
    return chr(ord("a") + i) if i < 26 else f"z{i}"
