"""The block layout of a call: which blocks see which, chosen by the model, for a branch `BlockSparse(None, block_size)`.

bool  (batch or 1, heads or 1, blocks, blocks)           entry [b, h, r, c]: block r of queries sees block c of keys
int   (batch or 1, kv_heads or 1, blocks, k)             the k blocks that block r sees; -1 is none
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilkit.op.boundary import check_device, check_tensor

if TYPE_CHECKING:
    from dilkit.pattern import Pattern

_INTEGERS = torch.int32, torch.int64


def check_layout(layout: Tensor | None, pattern: Pattern, query: Tensor, kv_heads: int) -> None:
    """Raise TypeError or ValueError unless `layout` is one for `query` `(batch, seq, heads, head_dim)`, or none is needed."""
    branch = pattern.given_blocks
    if branch is None:
        if layout is not None:
            way = "give it dilkit.BlockSparse(None, block_size)"
            raise ValueError(f"block_layout is given, but {pattern} has no branch for it; {way}")
        return
    if layout is None:
        raise ValueError(f"block_layout is missing; give it, or {branch.call()} its own, BlockSparse(layout, block_size)")
    check_tensor("block_layout", layout, "a torch.Tensor, bools or the numbers of blocks,")
    if layout.dtype is not torch.bool and layout.dtype not in _INTEGERS:
        raise TypeError(f"block_layout is {layout.dtype}; torch.bool, True = seen, or torch.int64, numbers of blocks, is needed")
    if layout.layout is not torch.strided or layout.is_nested:
        raise TypeError(f"block_layout has layout {layout.layout}; a plain tensor, torch.strided, is needed")
    check_device("block_layout", layout, query)
    batch, seq, heads, _ = query.shape
    blocks = -(-seq // branch.unit)
    of_bools = layout.dtype is torch.bool
    of_heads, last = (heads, f"{blocks}") if of_bools else (kv_heads, "k")
    fits = layout.dim() == 4 and layout.shape[0] in (1, batch) and layout.shape[1] in (1, of_heads)
    if not fits or layout.shape[2] != blocks or (of_bools and layout.shape[3] != blocks):
        needed = f"({batch} or 1, {of_heads} or 1, {blocks}, {last}) is needed"
        reason = f"seq={seq} tokens are {blocks} blocks of {branch.unit}"
        raise ValueError(f"block_layout has shape {tuple(layout.shape)}; {needed}: {reason}")


def check_choice(layout: Tensor, is_causal: bool) -> None:
    """Raise ValueError for chosen blocks that are none, are there twice, or come after a query block under causality; a GPU fails
    later.
    """
    if layout.dtype is torch.bool or not layout.numel():
        return
    blocks = layout.shape[2]
    low, high = layout.aminmax()
    within = (low >= -1) & (high < blocks)
    numbers = f"those of blocks, 0 to {blocks - 1}, or -1 for none are needed"
    _hold(within, lambda: f"has numbers from {int(low)} to {int(high)}; {numbers}")
    ascending = layout.sort(-1).values
    twice = (ascending[..., 1:] == ascending[..., :-1]) & (ascending[..., 1:] >= 0)
    _hold(~twice.any(), lambda: "has a block twice among those of one query block; each counts once: give -1 for none")
    if is_causal:
        rows = torch.arange(blocks, device=layout.device)[:, None]
        later = "has a block after its query block, of which no token is seen with is_causal=True; give -1"
        _hold((layout <= rows).all(), lambda: later)


def _hold(holds: Tensor, why: Callable[[], str]) -> None:
    if holds.device.type != "cpu":
        torch._assert_async(holds, "block_layout: malformed numbers of blocks; the same call on a CPU says which")
    elif not bool(holds):
        raise ValueError(f"block_layout {why()}")


def as_bools(layout: Tensor, heads: int) -> Tensor:
    """`(batch or 1, heads or 1, blocks, blocks)` of either form."""
    if layout.dtype is torch.bool:
        return layout
    blocks, shape = layout.shape[2], layout.shape[:3]
    seen = torch.zeros(*shape, blocks + 1, dtype=torch.bool, device=layout.device)  # the last column is for -1
    seen.scatter_(-1, layout.long().where(layout >= 0, blocks), True)
    seen = seen[..., :blocks]
    return seen if shape[1] in (1, heads) else seen.repeat_interleave(heads // shape[1], 1)


def with_layouts(pattern: Pattern, layout: Tensor, batch: int, heads: int, kv_heads: int) -> Iterator[Pattern]:
    """Yield `pattern` with its layout for each sequence of a batch."""
    shard, layouts = pattern.head_shard, as_bools(layout, heads)
    for b in range(batch):
        blocks = layouts[b if len(layouts) > 1 else 0]
        if shard is not None and len(blocks) > 1:  # heads of the model that are not here see nothing
            of_model = blocks.new_zeros(shard[1] * heads // kv_heads, *blocks.shape[1:])
            of_model[shard[0] * heads // kv_heads :][:heads] = blocks
            blocks = of_model
        yield pattern.with_layout(blocks)
