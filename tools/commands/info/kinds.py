"""Who computes which kind of branch, and what a call may ask of it, on one device: `dilkit info --kinds`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
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
from dilkit.device import Device
from dilkit.problem import Problem
from dilkit.selector import Trace
from dilkit.tools.console.text import table, wrapped

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


def lines(cells: Sequence[KindCell], device: Device) -> list[str]:
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
