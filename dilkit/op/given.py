"""The tensors of a call that say what a branch of its pattern shows: which keys a query sees, as the model chooses.

block_layout   bool    (batch or 1, heads or 1, blocks, blocks)    entry [b, h, r, c]: block r of queries sees block c of keys
               int     (batch or 1, kv_heads or 1, blocks, k)      the k blocks that block r sees; -1 is none
intervals      int32   (batch or 1, heads or 1, seq, k, 2)         a query sees keys begin to end - 1; begin >= end is none
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dilkit.op.boundary import check_device, check_tensor

if TYPE_CHECKING:
    from dilkit.inputs import Inputs
    from dilkit.pattern import Branch, Pattern

_WAYS = {
    "block_layout": ("BlockSparse(None, block_size)", "BlockSparse(layout, block_size)"),
    "intervals": ("Intervals(None, most=k)", "Intervals(first, last)"),
}
"""The arguments, each with the branch that takes it and the one that needs none."""


def check_given(inputs: Inputs, pattern: Pattern) -> None:
    """Raise TypeError or ValueError unless the call gives what `pattern` needs, nothing else, and of the shape of its query."""
    branch = pattern.given_branch
    argument = None if branch is None else branch.argument
    for name, (taking, having) in _WAYS.items():
        if getattr(inputs, name) is not None and name != argument:
            raise ValueError(f"{name} is given, but {pattern} has no branch for it; give it dilkit.{taking}")
        if getattr(inputs, name) is None and name == argument and branch is not None:
            raise ValueError(f"{name} is missing; give it to the call, or to {branch.call()} when it is made, {having}")
    if branch is None:
        return
    if argument == "intervals":
        _check_plain(inputs, "intervals", (torch.int32,), "torch.int32, begin and end of each interval,")
        _check_intervals(inputs, branch)
    else:
        needed = "torch.bool, True = seen, or torch.int64, numbers of blocks,"
        _check_plain(inputs, "block_layout", (torch.bool, torch.int32, torch.int64), needed)
        _check_layout(inputs, branch)


def _check_plain(inputs: Inputs, name: str, dtypes: tuple[torch.dtype, ...], needed: str) -> None:
    x = check_tensor(name, inputs.given, f"a torch.Tensor, {needed}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} is {x.dtype}; {needed} is needed")
    if x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"{name} has layout {x.layout}; a plain tensor, torch.strided, is needed")
    check_device(name, x, inputs.query)


def _check_layout(inputs: Inputs, branch: Branch) -> None:
    layout: Any = inputs.block_layout
    (batch, seq, heads, _), kv_heads = inputs.query.shape, inputs.key.shape[2]
    blocks = -(-seq // branch.unit)
    of_bools = layout.dtype is torch.bool
    of_heads, last = (heads, f"{blocks}") if of_bools else (kv_heads, "k")
    fits = layout.dim() == 4 and layout.shape[0] in (1, batch) and layout.shape[1] in (1, of_heads)
    if not fits or layout.shape[2] != blocks or (of_bools and layout.shape[3] != blocks):
        needed = f"({batch} or 1, {of_heads} or 1, {blocks}, {last}) is needed"
        reason = f"seq={seq} tokens are {blocks} blocks of {branch.unit}"
        raise ValueError(f"block_layout has shape {tuple(layout.shape)}; {needed}: {reason}")


def _check_intervals(inputs: Inputs, branch: Any) -> None:
    intervals: Any = inputs.intervals
    (batch, seq, heads, _), most = inputs.query.shape, branch.most
    fits = intervals.dim() == 5 and intervals.shape[0] in (1, batch) and intervals.shape[1] in (1, heads)
    if not fits or intervals.shape[2:] != (seq, most, 2):
        needed = f"({batch} or 1, {heads} or 1, {seq}, {most}, 2) is needed for {branch.call()}"
        raise ValueError(f"intervals has shape {tuple(intervals.shape)}; {needed}; one without keys is 0, 0")


def check_values(inputs: Inputs, is_causal: bool) -> None:
    """Raise ValueError for numbers that the call gives and that have no meaning; a GPU fails later.

    Chosen blocks have to be there, once each, and under causality none after the query block. Intervals of a query ascend, do not
    overlap and lie among the keys.
    """
    if inputs.intervals is not None:
        _check_ascending(inputs.intervals, inputs.key.shape[1])
    elif inputs.block_layout is not None and inputs.block_layout.dtype is not torch.bool:
        _check_choice(inputs.block_layout, is_causal)


def _check_choice(layout: Tensor, is_causal: bool) -> None:
    if not layout.numel():
        return
    blocks = layout.shape[2]
    low, high = layout.aminmax()
    within = (low >= -1) & (high < blocks)
    numbers = f"those of blocks, 0 to {blocks - 1}, or -1 for none are needed"
    _hold(within, "block_layout", lambda: f"has numbers from {int(low)} to {int(high)}; {numbers}")
    ascending = layout.sort(-1).values
    twice = (ascending[..., 1:] == ascending[..., :-1]) & (ascending[..., 1:] >= 0)
    _hold(
        ~twice.any(),
        "block_layout",
        lambda: "has a block twice among those of one query block; each counts once: give -1 for none",
    )
    if is_causal:
        rows = torch.arange(blocks, device=layout.device)[:, None]
        later = "has a block after its query block, of which no token is seen with is_causal=True; give -1"
        _hold((layout <= rows).all(), "block_layout", lambda: later)


def _check_ascending(intervals: Tensor, seq: int) -> None:
    if not intervals.numel():
        return
    begin, end = intervals.unbind(-1)
    seen = begin < end
    low, high = begin.where(seen, 0), end.where(seen, 0)
    apart = begin[..., 1:] >= high.cummax(-1).values[..., :-1]
    needed = f"0 <= begin < end <= {seq} is needed, or 0, 0 for none"
    _hold((low.amin() >= 0) & (high.amax() <= seq), "intervals", lambda: f"reaches from {low.amin()} to {high.amax()}; {needed}")
    _hold((apart | ~seen[..., 1:]).all(), "intervals", lambda: _overlap(intervals, apart | ~seen[..., 1:]))


def _overlap(intervals: Tensor, apart: Tensor) -> str:
    batch, head, row, _ = (~apart).nonzero()[0].tolist()
    where = f"query {row} of head {head} in sequence {batch}"
    return f"has {intervals[batch, head, row].tolist()} for {where}; each has to begin at or behind the end of those before it"


def _hold(holds: Tensor, name: str, why: Callable[[], str]) -> None:
    if holds.device.type != "cpu":
        torch._assert_async(holds, f"{name}: malformed numbers; the same call on a CPU says which")
    elif not bool(holds):
        raise ValueError(f"{name} {why()}")


def as_bools(layout: Tensor, heads: int) -> Tensor:
    """Return a block layout of either form as bools `(batch or 1, heads or 1, blocks, blocks)`."""
    if layout.dtype is torch.bool:
        return layout
    blocks, shape = layout.shape[2], layout.shape[:3]
    seen = torch.zeros(*shape, blocks + 1, dtype=torch.bool, device=layout.device)  # the last column is for -1
    seen.scatter_(-1, layout.long().where(layout >= 0, blocks), True)
    seen = seen[..., :blocks]
    return seen if shape[1] in (1, heads) else seen.repeat_interleave(heads // shape[1], 1)


def counted(inputs: Inputs, pattern: Pattern, rows: Tensor, **options: Any) -> Tensor:
    """Return `pattern.count_rows` of these rows with what the call gives: `(batch or 1, heads, len(rows), seq)`."""
    seq, heads = inputs.key.shape[1], inputs.query.shape[2]
    tensors: Any = [None]
    if inputs.given is not None:
        tensors = inputs.intervals if inputs.block_layout is None else as_bools(inputs.block_layout, heads)
    return torch.stack([pattern.count_rows(rows, seq, heads, given=one, **options) for one in tensors])
