"""Tables of `dilkit info`: --kinds, the backend of each kind of branch; --all, that of the problem on every known device."""

from __future__ import annotations

import string
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from dilkit import (
    BlockSparse,
    Branch,
    DilatedSegment,
    Documents,
    GlobalTokens,
    Intervals,
    Neighborhood,
    Pattern,
    Prefix,
    SlidingWindow,
    Strided,
)
from dilkit.bias.form import BiasForm
from dilkit.device import GENERATIONS, Device
from dilkit.problem import DTYPES, Problem
from dilkit.selection.preference import BY_DESIGN, PreferenceRow
from dilkit.selection.preference_table import TABLE, row_of
from dilkit.selector import Trace, explain
from dilkit.tools.commands.facts import Failure, guarded
from dilkit.tools.console.text import table, wrapped
from dilkit.tools.results.decode import encode

SEQ, BLOCK = 16384, 64

ASKED: dict[str, dict[str, Any]] = {
    "training": {},
    "with a mask": dict(key_padding_mask=True),
    "with a bias": dict(bias=BiasForm()),
    "with a softcap": dict(softcap=30.0),
    "packed": dict(varlen=True),
    "with dropout": dict(dropout_p=0.1),
    "cache of all keys": dict(kv_cache=True, requires_grad=False, is_causal=True),
}
"""What a call asks for, beside a backward pass."""

OF_WHOLE_SEQUENCES = frozenset({"packed", "cache of all keys"})
"""What has no meaning where each call gives the blocks: they are those of whole sequences."""


@cache
def examples() -> dict[str, Branch]:
    """A branch of each kind for `SEQ` tokens, and one whose blocks each call gives."""
    blocks = SEQ // BLOCK
    local = [[column <= row < column + 4 or column == 0 for column in range(blocks)] for row in range(blocks)]
    branches: tuple[Branch, ...] = (
        DilatedSegment(SEQ // 2, 4),
        SlidingWindow(512),
        GlobalTokens(16),
        Strided(128),
        BlockSparse(local, BLOCK),
        Neighborhood((128, 128), 13),
        Documents([SEQ // 2, SEQ // 4, SEQ // 4]),
        Prefix(1024),
        Intervals([[0, max(0, i - 512)] for i in range(SEQ)], [[15, i] for i in range(SEQ)]),
    )
    return {type(branch).__name__: branch for branch in branches} | {"blocks of each call": BlockSparse(None, BLOCK)}


@dataclass(frozen=True)
class KindCell:
    """Who computes a kind of branch in a call that asks for something; `refusals`: why those that lack least do not."""

    kind: str
    asked: str
    picked: str | None
    refusals: tuple[str, ...]


def kind_cells(device: Device, dtype: str, explain: Callable[[Problem], Trace]) -> list[KindCell]:
    """A cell for every kind and everything that calls may ask for."""
    cells = []
    for kind, branch in examples().items():
        plain = Problem(pattern=Pattern.of(branch), seq=SEQ, heads=8, head_dim=64, dtype=dtype, device=device, requires_grad=True)
        for asked, options in ASKED.items():
            if branch.is_given_by_call and asked in OF_WHOLE_SEQUENCES:
                continue
            trace = explain(replace(plain, **options))
            others = [d for d in trace.decisions if d.reasons and d.verdict in ("refused", "broken")]
            others = [d for d in others if not d.reasons[0].startswith("device ")]
            fewest = min((len(d.reasons) for d in others), default=0)
            why = (f"{d.name}: {'; '.join(d.reasons)}" for d in others if len(d.reasons) == fewest)
            cells.append(KindCell(kind, asked, trace.picked, tuple(why)))
    return cells


def by_kind(cells: Iterable[KindCell]) -> dict[str, dict[str, str]]:
    """Who is picked, by the kind and by what is asked for; "-" where there is no such call."""
    picked: dict[str, dict[str, str]] = {}
    for cell in cells:
        picked.setdefault(cell.kind, dict.fromkeys(ASKED, "-"))[cell.asked] = cell.picked or "none"
    return picked


def kind_lines(cells: Sequence[KindCell], device: Device) -> list[str]:
    """The table, and below it why nothing but `reference` computes what is left to it on a GPU."""
    shown = table([("", *ASKED), *((kind, *of_kind.values()) for kind, of_kind in by_kind(cells).items())])
    left: dict[tuple[str, ...], list[str]] = {}
    for cell in cells if device.type == "cuda" else ():
        if cell.picked in (None, "reference"):
            left.setdefault(cell.refusals, []).append(f"{cell.kind} {cell.asked}")
    for refusals, whose in left.items():
        shown += ["", *wrapped("", f"left to the definition, which is slow: {', '.join(whose)}")]
        shown += table((why,) for why in refusals)
    return shown


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


def matrix_lines(cells: Sequence[Cell]) -> list[str]:
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
