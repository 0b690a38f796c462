"""Attention over the segments that lie within a rank's shard: nothing is sent, all branches of a range in one call."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dilkit.comm.passes.attention_op import AttentionOp, merge_into
from dilkit.comm.passes.rank_bias import RankBias
from dilkit.comm.plan.exchange_plan import LocalRange
from dilkit.inputs import Inputs
from dilkit.op.boundary import lse_dtype
from dilkit.op.call_options import CallOptions
from dilkit.op.operators import attend, differentiate


def local_forward(
    op: AttentionOp,
    ranges: tuple[LocalRange, ...],
    is_causal: bool,
    inputs: Inputs,
    bias: RankBias | None,
) -> tuple[Tensor, Tensor]:
    """`out` like `query`, contiguous, and `lse` `(batch, seq, heads)`; 0 and -inf where nothing is seen within the shard."""
    query, results = inputs.query, None
    for local in ranges:
        rows = slice(*local[:2])
        part_out, part_lse = attend(*_call(op, local, is_causal, inputs, bias))
        part_lse = part_lse.transpose(1, 2).contiguous()
        if results is None and part_out.shape == query.shape:
            results = part_out, part_lse
        else:
            results = results or _no_results(query)
            _merge(results[0][:, rows], results[1][:, rows], part_out, part_lse)
    return results or _no_results(query)


def _call(
    op: AttentionOp, local: LocalRange, is_causal: bool, inputs: Inputs, bias: RankBias | None
) -> tuple[Inputs, CallOptions]:
    start, stop, pattern, position = local
    query, key, value, mask, *_ = inputs
    rows = slice(start, stop)
    part_mask, part_bias = None if mask is None else mask[:, rows], None if bias is None else bias.of_range(rows)
    part = Inputs(query[:, rows], key[:, rows], value[:, rows], part_mask, bias=part_bias)
    places = [(number, 0, position, position, 1) for number in range(len(query))]  # as `dilkit.op.dropout.Dropout` has them
    return op.call(part, pattern, is_causal, np.array(places, np.int64).reshape(len(query), 5))


def _no_results(query: Tensor) -> tuple[Tensor, Tensor]:
    lse = query.new_full(query.shape[:3], -math.inf, dtype=lse_dtype(query.dtype))
    return query.new_zeros(query.shape), lse


def _merge(out: Tensor, lse: Tensor, found: Tensor, found_lse: Tensor) -> None:
    """Merge `found` into `out`, one sequence of the batch after the other: the rows of one lie together."""
    rows = torch.arange(lse.shape[1] * lse.shape[2], device=lse.device)
    for mine, mine_lse, more, more_lse in zip(out, lse, found, found_lse, strict=True):
        flat = mine.view(-1, out.shape[-1])
        wide = flat.to(lse.dtype)
        merge_into((wide, mine_lse.view(-1)), rows, more.reshape(flat.shape), more_lse.reshape(-1))
        flat.copy_(wide)


def local_backward(
    op: AttentionOp,
    ranges: tuple[LocalRange, ...],
    is_causal: bool,
    dout: Tensor,
    inputs: Inputs,
    bias: RankBias | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, contiguous, given the `out` and `lse` `(batch, seq, heads)` of the whole softmax.

    That of the weights of the bias is added to its own.
    """
    grads: tuple[Tensor, ...] | None = None
    for local in ranges:
        rows = slice(*local[:2])
        part_lse = lse[:, rows].transpose(1, 2).contiguous()
        call, options = _call(op, local, is_causal, inputs, bias)
        part_gradients = differentiate(dout[:, rows], call, out[:, rows], part_lse, options)
        if bias is not None and bias.form.learned:
            bias.gradient.add_(part_gradients[3])
        if grads is None and part_gradients[0].shape == dout.shape:
            grads = tuple(grad.contiguous() for grad in part_gradients[:3])
        else:
            grads = grads or tuple(x.new_zeros(x.shape) for x in inputs[:3])
            for grad, more in zip(grads, part_gradients[:3], strict=True):
                grad[:, rows] += more
    dquery, dkey, dvalue = grads or (x.new_zeros(x.shape) for x in inputs[:3])
    return dquery, dkey, dvalue
