"""Tables of `dilkit info`: --kinds, the backend of each kind of branch; --all, that of the problem on every known device."""

from __future__ import annotations

import string
import textwrap
from collections.abc import Callable, Iterable, Sequence
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
from dilkit.selection.preference import BY_DESIGN
from dilkit.selection.preference_table import TABLE, row_of
from dilkit.selector import Trace, explain
from dilkit.tools.commands.facts import Failure, guarded
from dilkit.tools.console.text import table, wrapped
from dilkit.tools.results.decode import encode

SEQ, BLOCK = 16384, 64
BY_CALL = "blocks of each call"

ASKED: dict[str, dict[str, Any]] = {
    "training": {},
    "with a mask": dict(key_padding_mask=True),
    "with a bias": dict(bias=BiasForm()),
    "with a softcap": dict(softcap=30.0),
    "packed": dict(varlen=True),
    "with dropout": dict(dropout_p=0.1),
    "cache of all keys": dict(kv_cache=True, requires_grad=False, is_causal=True),
}
"""Options of calls, beside a backward pass."""

OF_WHOLE_SEQUENCES = frozenset({"packed", "cache of all keys"})
"""Options without meaning where each call gives the blocks: they are those of whole sequences."""


@cache
def examples() -> dict[str, Branch]:
    """Return a branch of each kind for `SEQ` tokens, and one whose blocks each call gives."""
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
    return {type(branch).__name__: branch for branch in branches} | {BY_CALL: BlockSparse(None, BLOCK)}


@dataclass(frozen=True)
class KindCell:
    """The backend of a kind of branch in a call with an option; `refusals`: reasons of the backends that lack least."""

    kind: str
    asked: str
    picked: str | None
    refusals: tuple[str, ...]


def kind_cells(device: Device, dtype: str, explain: Callable[[Problem], Trace]) -> list[KindCell]:
    """Return a cell for every kind and every option."""
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
    """Return the picks by kind and option; "-" where there is no such call."""
    picked: dict[str, dict[str, str]] = {}
    for cell in cells:
        picked.setdefault(cell.kind, dict.fromkeys(ASKED, "-"))[cell.asked] = cell.picked or "none"
    return picked


def kind_lines(cells: Sequence[KindCell], device: Device) -> list[str]:
    """Return the table, and below it the reasons for which a GPU leaves calls to `reference`."""
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
    """The problem on one device in one dtype. `row`: number of the table's row that decided; None: another reason did."""

    label: str
    dtype: str
    trace: Trace | Failure
    row: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        where = dict(label=self.label, dtype=self.dtype)
        return where | (encode(self.trace) if isinstance(self.trace, Failure) else dict(self.trace.to_dict(), row=self.row))


def orders() -> list[dict[str, Any]]:
    """Return the rows of the table as plain data, numbered from 1 on."""
    return [dict(number=number, **row.to_dict()) for number, row in enumerate(TABLE, 1)]


def matrix(problem: Problem, here: Iterable[Device], backend: Sequence[str] | None) -> list[Cell]:
    """Return the trace of `problem`, on the devices `here` and on one of each generation, for each dtype."""
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
    """Return the picks, each with the number of the row that decided, and the rows; other reasons have letters."""
    traces = [cell.trace for cell in cells if isinstance(cell.trace, Trace)]
    why = dict.fromkeys(str(c.trace.why) for c in cells if isinstance(c.trace, Trace) and c.trace.picked and not c.row)
    letters = dict(zip(why, string.ascii_letters, strict=False))
    by_device: dict[str, list[str]] = {}
    for cell in cells:
        shown = "?"
        if isinstance(cell.trace, Trace):
            shown = f"{cell.trace.picked} {cell.row or letters[str(cell.trace.why)]}" if cell.trace.picked else "none"
        by_device.setdefault(cell.label, []).append(shown)
    lines = table([("", *DTYPES), *((label, *picks) for label, picks in by_device.items())])
    lines += table(dict.fromkeys((cell.trace.error,) for cell in cells if isinstance(cell.trace, Failure)))
    refusals = [(d.name, reason) for one in traces for d in one.decisions if d.verdict == "refused" for reason in d.reasons]
    lines += table(dict.fromkeys(pair for pair in refusals if pair[1].startswith("module ")))  # what is not installed
    if letters:
        lines += ["", "picked for other reasons than the table's", *table((letter, reason) for reason, letter in letters.items())]
    head = f"the table of orders; the first row that fits decides. Of GPUs it holds {BY_DESIGN}, where no measurement is named"
    lines += ["", *table([(head,)], indent=0)]
    rows = []
    for number, row in enumerate(TABLE, 1):
        basis = "" if row.basis == BY_DESIGN else f" ({row.basis})"
        rows.append((str(number), f"{row.where}: {', '.join(row.order)}\n{row.why}{basis}"))
    return [*lines, *table(rows)]
