"""The last rows of sequences against a cache, in plain matrix products: those of all sequences, whose lengths differ, at once.

Of each branch the segments that hold any of these rows take part: their keys are gathered up to the end of the sequence.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from dilkit.backends.sdpa.packed import PackedOutput
from dilkit.backends.sdpa.segment_batches import HeadBlock, Int64Array, branch_heads, of_equal_size, segments
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

ROWS_AT_ONCE, SCORES_AT_ONCE = 256, 2**24
"""Query rows of a sequence, and scores of all heads and sequences, about."""


def last_rows(query: Tensor, key: Tensor, value: Tensor, problem: Problem, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `out` like `query` and `lse` `(batch, heads, rows)`; `lengths` as `Inputs.cache_seqlens`."""
    import torch

    ends, rows = lengths.cpu().numpy().astype(np.int64), query.shape[1]
    blocks = [slice(start, min(start + ROWS_AT_ONCE, rows)) for start in range(0, rows, ROWS_AT_ONCE)]
    parts = [_last_rows(query[:, block], key, value, problem, ends - (rows - block.stop)) for block in blocks]
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 2)


def _last_rows(query: Tensor, key: Tensor, value: Tensor, problem: Problem, ends: Int64Array) -> tuple[Tensor, Tensor]:
    batch, rows = query.shape[:2]
    whole = PackedOutput(query.reshape(1, batch * rows, *query.shape[2:]), problem)
    for branch, heads in branch_heads(problem):
        sequence, first, span = segments(ends - rows, ends, branch.length)
        tables = sequence, first, span, ends[sequence] - rows
        for some, keys in of_equal_size(span, branch.rate, SCORES_AT_ONCE // (heads.count * rows)):
            places, q, k, v, unseen = _gathered(query, key, value, branch.rate, heads, [x[some] for x in tables], keys)
            whole.add(places, *_attention(q, k, v, unseen, problem.scale))
    out, lse = whole.result()
    return out.view(query.shape), lse.view(-1, batch, rows).transpose(0, 1).contiguous()


def _gathered(
    query: Tensor, key: Tensor, value: Tensor, rate: int, heads: HeadBlock, tables: list[Int64Array], keys: int
) -> tuple[Tensor, ...]:
    """Return places of queries, q `(segments, kv_count, group, rows, head_dim)`, k, v, unseen `(segments, kv_count, rows, keys)`.

    `tables`: the sequence of each segment, its first row there, its rows up to the sequence's end, and the first row to compute.
    """
    import torch

    rows, device = query.shape[1], query.device
    sequence, first, span, begin = (torch.from_numpy(x).to(device)[:, None, None] for x in tables)
    offset = torch.from_numpy(heads.offsets).to(device)[:, None]
    query_heads, kv_heads = heads.numbers(device)
    key_at = offset + rate * torch.arange(keys, device=device)
    earlier = ((begin - first - offset).clamp(min=0) + rate - 1) // rate
    query_at = offset + rate * (earlier + torch.arange(-(-rows // rate), device=device))
    row = (first + query_at - begin).clamp(0, rows - 1)
    places = ((sequence * rows + row)[:, :, None] * query.shape[2] + query_heads).masked_fill_(
        (query_at >= span)[:, :, None], query.shape[:3].numel()
    )
    q, beyond = query[sequence[..., None], row[:, :, None], query_heads], (key_at >= span).unsqueeze(-1)
    key_index = sequence, (first + key_at).where(key_at < span, first), kv_heads.squeeze(-1)
    k, v = (x[key_index].masked_fill_(beyond, 0.0) for x in (key, value))
    return places.flatten(0, 1), q, k, v, key_at[:, None] > query_at.unsqueeze(-1)


def _attention(q: Tensor, k: Tensor, v: Tensor, unseen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return `out` `(segments * kv_count, group, rows, head_dim)` and `lse`, without its last dimension; at least in fp32."""
    import torch

    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    scores = (q.flatten(2, 3) @ k.mT).mul_(scale).view(*q.shape[:4], -1)
    scores.masked_fill_(unseen.unsqueeze(2), -math.inf)
    lse = torch.logsumexp(scores, -1)
    out = scores.sub_(lse.unsqueeze(-1)).exp_().flatten(2, 3) @ v
    return out.view(q.shape).flatten(0, 1), lse.flatten(0, 1)
