"""Packed sequences by torch's fused kernels: segments are gathered into batches, and what kernels return is put back.

As in `accumulators`, gradients add up, given `out` and `lse` of the whole, and one launch of `RowKernels` merges or adds what was
gathered of the whole. Results of padding go to one row after the last, which nobody reads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dilkit.backends.sdpa.accumulators import RowKernels, merge
from dilkit.backends.sdpa.segment_batches import SegmentBatch, segment_batches
from dilkit.inputs import Inputs
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.backends.sdpa.kernels import SdpaKernel


def packed_forward(
    kernel: SdpaKernel, inputs: Inputs, problem: Problem, scale: float, merging: RowKernels | None
) -> tuple[Tensor, Tensor]:
    q, k, v = (_by_row(x) for x in inputs[:3])
    whole = PackedOutput(inputs.query, problem, merging)
    for batch in segment_batches(problem, inputs.cu_seqlens, inputs.query.shape[1]):
        views = _queries(q, batch), _keys(k, batch), _keys(v, batch)
        parts = kernel.forward(*views, _ignored(batch, problem), problem.is_causal, scale)
        whole.add(batch.queries, *parts, batch.first)
    return whole.result()


def packed_backward(
    kernel: SdpaKernel,
    dout: Tensor,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    problem: Problem,
    scale: float,
    adding: RowKernels | None,
) -> tuple[Tensor, Tensor, Tensor]:
    do, q, k, v, o = (_by_row(x) for x in (dout, *inputs[:3], out))
    # exp(s - inf) = 0: a row that sees nothing has no gradient, and neither has padding.
    sums = lse.masked_fill(lse == -math.inf, math.inf).transpose(1, 2).reshape(-1, 1)
    dquery, dkey, dvalue = (_Gradient(x, problem, i > 0, adding) for i, x in enumerate(inputs[:3]))
    for batch in segment_batches(problem, inputs.cu_seqlens, inputs.query.shape[1]):
        views = _queries(do, batch), _queries(q, batch), _keys(k, batch), _keys(v, batch)
        whole = _queries(o, batch), _gathered(sums, batch.queries, batch.padding, math.inf).squeeze(-1)
        dq, dk, dv = kernel.backward(*views, *whole, _ignored(batch, problem), problem.is_causal, scale)
        dquery.add(batch.queries, dq, batch.first)
        dkey.add(batch.keys, dk, batch.first)
        dvalue.add(batch.keys, dv, batch.first)
    return dquery.result(), dkey.result(), dvalue.result()


def _by_row(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[3])


def _gathered(x: Tensor, index: Tensor, padding: Tensor | None, fill: float = 0.0) -> Tensor:
    """Gather the rows `index` of `x`, with `fill` in padding."""
    if padding is None:
        return x.index_select(0, index.flatten()).view(*index.shape, -1)
    gathered = x.index_select(0, index.flatten().clamp(max=len(x) - 1)).view(*index.shape, -1)
    return gathered.masked_fill_(padding.unsqueeze(-1), fill)


def _queries(x: Tensor, batch: SegmentBatch) -> Tensor:
    return _gathered(x, batch.queries, batch.padding)


def _keys(x: Tensor, batch: SegmentBatch) -> Tensor:
    return _gathered(x, batch.keys, batch.padding).expand(-1, batch.queries.shape[1], -1, -1)


def _ignored(batch: SegmentBatch, problem: Problem) -> Tensor | None:
    """Return the mask of a call; None under causality: padding comes after all rows."""
    if batch.padding is None or problem.is_causal:
        return None
    return batch.padding.expand(-1, batch.queries.shape[1], -1).contiguous()


class PackedOutput:
    """`out` and `lse` of the batches so far, by rows of all heads, with one row more for padding.

    Halves are merged in fp32. With `kernels` they are rounded each time, and no tensor of fp32 is held.
    """

    def __init__(self, query: Tensor, problem: Problem, kernels: RowKernels | None = None) -> None:
        from dilkit.op.boundary import lse_dtype

        kind = lse_dtype(query.dtype)
        rows, in_kind = query.shape[1] * problem.heads + 1, len(problem.pattern.branches) > 1 and kernels is None
        self.like, self.merge = query, merge if kernels is None else kernels.merge
        self.out = query.new_zeros(rows, problem.head_dim, dtype=kind if in_kind else query.dtype)
        self.lse = query.new_full((rows,), -math.inf, dtype=kind)

    def add(self, places: Tensor, out: Tensor, lse: Tensor, first: bool = False) -> None:
        """Merge `out` `(problems, group, rows, head_dim)` and `lse` `(problems, group, rows)` into `places`, like `lse`."""
        index = places.flatten()
        if not first:  # something is there to merge with
            part, part_lse = out, lse
            out, lse = (x.index_select(0, index).view(like.shape) for x, like in ((self.out, part), (self.lse, part_lse)))
            self.merge(out, lse, part, part_lse)
        self.out.index_copy_(0, index, out.flatten(0, 2).to(self.out.dtype))
        self.lse.index_copy_(0, index, lse.flatten())

    def result(self) -> tuple[Tensor, Tensor]:
        _, total, heads, _ = self.like.shape
        lse = self.lse[:-1].view(1, total, heads).transpose(1, 2).contiguous()
        return self.out[:-1].view(self.like.shape).to(self.like.dtype), lse


class _Gradient:
    """The gradient of `like`; halves are summed in fp32 when there is more than one term."""

    def __init__(self, like: Tensor, problem: Problem, kv: bool, kernels: RowKernels | None) -> None:
        import torch

        several = len(problem.pattern.branches) > 1 or (kv and problem.heads > problem.kv_heads)
        dtype = torch.promote_types(like.dtype, torch.float32) if several else like.dtype
        self.like, self.kernels = like, kernels
        self.total = like.new_zeros(like.shape[1:3].numel() + 1, like.shape[3], dtype=dtype)

    def add(self, index: Tensor, part: Tensor, first: bool) -> None:
        """Add `part` `(problems, group, rows, head_dim)` at `index`; of query heads that share a key, the sum."""
        places, heads = index.flatten(), [part.to(self.total.dtype)]
        if self.kernels is not None and not (first and index.shape == part.shape[:3]):
            rows = self.total.index_select(0, places).view(*index.shape, -1)
            self.kernels.add(rows.expand_as(part), part)
            self.total.index_copy_(0, places, rows.flatten(0, 2))
            return
        if index.shape[1] < part.shape[1]:
            heads = [one.unsqueeze(1) for one in heads[0].unbind(1)]
        whole = heads.pop(0) if first else self.total.index_select(0, places).view(*index.shape, -1)
        for one in heads:
            whole = whole + one
        self.total.index_copy_(0, places, whole.flatten(0, 2))

    def result(self) -> Tensor:
        return self.total[:-1].view(self.like.shape).to(self.like.dtype)
