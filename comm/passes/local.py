"""What a rank computes of its own rows alone: the segments that lie within its shard, all branches of a range in one call."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dilkit.comm.passes.compute import Kernel
from dilkit.comm.passes.partial import Partial
from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.plan.spread import local_range
from dilkit.op.operators import backward_op, forward_op, lse_dtype
from dilkit.pattern import Pattern


class Range(NamedTuple):
    """Rows `start .. stop - 1` of a shard, and the branches whose segments tile them."""

    start: int
    stop: int
    pattern: Pattern


@lru_cache(maxsize=256)
def local_ranges(plan: ExchangePlan, rank: int) -> tuple[Range, ...]:
    """The ranges that a rank computes by itself; none where segments are computed one by one."""
    if not plan.fuse_branches:
        return ()
    first, last = plan.cuts[rank : rank + 2]
    branches: dict[tuple[int, int], list[int]] = {}
    for b, branch in enumerate(plan.moved.branches):
        start, stop = local_range(max(min(branch.segment_length, plan.seq), 1), first, last, plan.seq)
        if start < stop:
            branches.setdefault((start - first, stop - first), []).append(b)
    every = list(range(len(plan.pattern.branches)))
    return tuple(
        Range(start, stop, _only(plan.pattern, every if plan.is_joint else which)) for (start, stop), which in branches.items()
    )


def _only(pattern: Pattern, branches: list[int]) -> Pattern:
    """Some branches of a pattern."""
    if len(branches) == len(pattern.branches):
        return pattern
    chosen = [pattern.branches[b] for b in branches]
    heads = None if pattern.heads is None else [branch.heads for branch in chosen]
    lengths, rates = [branch.segment_length for branch in chosen], [branch.dilation_rate for branch in chosen]
    return Pattern(lengths, rates, pattern.offset, pattern.overlap, heads, pattern.head_shard)


def local_forward(
    kernel: Kernel, ranges: tuple[Range, ...], is_causal: bool, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`out` like `query`, contiguous, and `lse` `(batch, seq, heads)`; 0 and -inf where nothing is seen within the shard."""
    out = lse = None
    for r in ranges:
        rows = slice(r.start, r.stop)
        inputs = (query[:, rows], key[:, rows], value[:, rows], None if mask is None else mask[:, rows])
        found, found_lse = forward_op(*inputs, kernel.scale, kernel.call(r.pattern, is_causal))
        found_lse = found_lse.transpose(1, 2).contiguous()
        if out is None and found.shape == query.shape:
            out, lse = found, found_lse
        else:
            out, lse = _nothing(query) if out is None or lse is None else (out, lse)
            _join(out[:, rows], lse[:, rows], found, found_lse)
    return _nothing(query) if out is None or lse is None else (out, lse)


def _nothing(query: Tensor) -> tuple[Tensor, Tensor]:
    lse = query.new_full(query.shape[:3], -math.inf, dtype=lse_dtype(query.dtype))
    return query.new_zeros(query.shape), lse


def _join(out: Tensor, lse: Tensor, found: Tensor, found_lse: Tensor) -> None:
    """Join `found` to `out`, sequence by sequence: of one, the rows lie together."""
    rows = torch.arange(lse.shape[1] * lse.shape[2], device=lse.device)
    for mine, mine_lse, more, more_lse in zip(out, lse, found, found_lse, strict=True):
        flat = mine.view(-1, out.shape[-1])
        joined = Partial(flat, mine_lse.view(-1))
        joined.join(rows, more.reshape(flat.shape), more_lse.reshape(-1))
        flat.copy_(joined.out)


def local_backward(
    kernel: Kernel,
    ranges: tuple[Range, ...],
    is_causal: bool,
    dout: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, contiguous, given the `out` and `lse` `(batch, seq, heads)` of the whole softmax."""
    query, key, value, mask = inputs
    grads: tuple[Tensor, ...] | None = None
    for r in ranges:
        rows = slice(r.start, r.stop)
        part_lse = lse[:, rows].transpose(1, 2).contiguous()
        tensors = (dout[:, rows], query[:, rows], key[:, rows], value[:, rows], out[:, rows], part_lse)
        part_mask = None if mask is None else mask[:, rows]
        found = backward_op(*tensors, part_mask, kernel.scale, kernel.call(r.pattern, is_causal))
        if grads is None and found[0].shape == query.shape:
            grads = tuple(grad.contiguous() for grad in found)
        else:
            grads = grads or tuple(x.new_zeros(x.shape) for x in (query, key, value))
            for grad, more in zip(grads, found, strict=True):
                grad[:, rows] += more
    dquery, dkey, dvalue = grads or (x.new_zeros(x.shape) for x in (query, key, value))
    return dquery, dkey, dvalue
