"""Make the tensors of a pattern that each call chooses: blocks by their scores, and intervals from a mask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dilkit.checks import boolean, integer
from dilkit.inputs import Inputs
from dilkit.op.arguments import check_inputs
from dilkit.op.boundary import check_tensor
from dilkit.pattern import Pattern

__all__ = ["intervals_of_mask", "top_k_blocks"]

WHOLE = Pattern.dense()
"""A pattern of all heads, for the checks of tensors: torch.compile can make no patterns."""


@torch.no_grad()
def top_k_blocks(query: Tensor, key: Tensor, block_size: int, k: int, *, is_causal: bool = False) -> Tensor:
    """Choose the `k` blocks of keys that each block of queries scores highest, itself always among them.

        score[b, g, r, c] = (mean of the queries of block r, over the query heads of g too) . (mean of the keys of block c)

    MoBA (arXiv 2502.13189) scores the blocks of a query so; here the queries of a block see the same.

    - `query` `(batch, seq, heads, head_dim)`, `key` `(batch, seq, kv_heads, head_dim)`; the last block may be short.
    - `is_causal`: only blocks that do not come after the block of queries. Where there are fewer than `k`, -1 fills up.

    Returns int64 `(batch, kv_heads, blocks, min(k, blocks))`, descending by score behind the own block: `block_layout` of
    `dilkit.dilated_attention` for a branch `BlockSparse(None, block_size)`. It has no gradient. Raises TypeError or ValueError
    for tensors that do not fit each other and numbers below 1.

        >>> import torch
        >>> from dilkit import BlockSparse, Pattern, dilated_attention
        >>> from dilkit.sparse import top_k_blocks
        >>> q, k, v = torch.randn(3, 1, 512, 4, 16).unbind()
        >>> chosen = top_k_blocks(q, k, block_size=64, k=2, is_causal=True)
        >>> chosen.shape, chosen[0, 0, :2].tolist()
        (torch.Size([1, 4, 8, 2]), [[0, -1], [1, 0]])
        >>> pattern = Pattern.of(BlockSparse(None, block_size=64))
        >>> dilated_attention(q, k, v, pattern, block_layout=chosen, is_causal=True).shape
        torch.Size([1, 512, 4, 16])
    """
    check_inputs(Inputs(query, key, key), WHOLE)
    boolean("is_causal", is_causal)
    size, most = integer("block_size", block_size, at_least=1), integer("k", k, at_least=1)
    of_queries, of_keys = _means(query, size), _means(key, size)
    blocks = of_keys.shape[1]
    grouped = of_queries.view(*of_keys.shape[:3], -1, of_keys.shape[3]).mean(3)
    scores = torch.einsum("brgd,bcgd->bgrc", grouped, of_keys)
    scores = scores.nan_to_num(torch.finfo(scores.dtype).max)  # below inf, the own block's, and above -inf, that of later ones
    if is_causal:
        scores = scores.masked_fill(torch.ones(blocks, blocks, dtype=torch.bool, device=scores.device).triu(1), -torch.inf)
    scores.diagonal(dim1=2, dim2=3).fill_(torch.inf)
    highest = scores.topk(min(most, blocks), dim=-1)
    return highest.indices.masked_fill(highest.values == -torch.inf, -1)


@torch.no_grad()
def intervals_of_mask(mask: Tensor, most: int | None = None) -> Tensor:
    """Return the runs of True of each row of a mask, as `intervals=` of `dilkit.dilated_attention` takes them.

    - `mask`: bool `(batch or 1, heads or 1, seq, keys)`, True = seen; of floats that are added to scores, `mask == 0`.
    - `most`: the intervals of a row; by default as many as the row with the most has.

    Returns int32 `(batch or 1, heads or 1, seq, most, 2)`, for a branch `Intervals(None, most=most)`. It takes a look at each
    pair, as the mask did; a model that knows its intervals has no need of a mask. Raises TypeError or ValueError for a mask of
    another dtype or shape, and for a row with more than `most` runs.

        >>> import torch
        >>> from dilkit.sparse import intervals_of_mask
        >>> mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
        >>> intervals_of_mask(mask[None, None])[0, 0].tolist()
        [[[0, 1], [2, 3]], [[0, 0], [0, 0]], [[0, 3], [0, 0]]]
    """
    if check_tensor("mask", mask).dtype is not torch.bool:
        raise TypeError(f"mask is {mask.dtype}; torch.bool, True = seen, is needed (mask == 0 of one that is added to scores)")
    if mask.dim() != 4:
        raise ValueError(f"mask has shape {tuple(mask.shape)}; (batch or 1, heads or 1, seq, keys) is needed")
    steps = F.pad(mask.flatten(0, 2).to(torch.int8), (1, 1)).diff(dim=1)
    row, begin = (steps == 1).nonzero().unbind(1)
    end = (steps == -1).nonzero()[:, 1]
    counts = torch.bincount(row, minlength=len(steps))
    needed = int(counts.max()) if len(counts) else 0
    most = max(needed, 1) if most is None else integer("most", most, at_least=1)
    if needed > most:
        raise ValueError(f"mask has a row of {needed} runs; most={most} are possible: give most={needed}")
    intervals = mask.new_zeros(len(steps), most, 2, dtype=torch.int32)
    number = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]  # of a run in its row
    intervals[row, number] = torch.stack((begin, end), 1).int()
    return intervals.view(*mask.shape[:3], most, 2)


def _means(x: Tensor, size: int) -> Tensor:
    seq, wide = x.shape[1], x.to(torch.promote_types(x.dtype, torch.float32))
    blocks = -(-seq // size)
    filled = F.pad(wide, (0, 0, 0, 0, 0, blocks * size - seq))
    sums = filled.view(x.shape[0], blocks, size, *x.shape[2:]).sum(2)
    rows: Tensor = (seq - torch.arange(blocks, device=x.device) * size).clamp(max=size)
    return sums / rows[:, None, None]
