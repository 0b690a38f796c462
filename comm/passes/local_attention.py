"""Attention over the segments that lie within a rank's shard: nothing is sent, all branches of a range in one call."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilkit import plan as core_plan
from dilkit.comm.passes.attention_op import AttentionOp
from dilkit.comm.passes.partial_results import PartialResults
from dilkit.comm.passes.rank_bias import RankBias
from dilkit.comm.passes.rank_inputs import RankInputs
from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.inputs import Inputs
from dilkit.op.boundary import lse_dtype
from dilkit.op.call_options import CallOptions
from dilkit.op.operators import attend, differentiate
from dilkit.pattern import Branch, Pattern


class LocalRange(NamedTuple):
    """Rows `start .. stop - 1` of a shard, the branches whose segments tile them, and the position of the first row."""

    start: int
    stop: int
    pattern: Pattern
    position: int

    def places(self, batch: int) -> NDArray[np.int64]:
        """Where these rows lie in the whole, `(batch, 5)`, as `dilkit.op.dropout.Dropout` has it."""
        return np.array([(number, 0, self.position, self.position, 1) for number in range(batch)], np.int64).reshape(batch, 5)


class _Ranges(NamedTuple):
    """Ranges as they are cached, with the bytes of the plan that their key keeps alive."""

    ranges: tuple[LocalRange, ...]
    nbytes: int


def local_ranges(plan: ExchangePlan, rank: int) -> tuple[LocalRange, ...]:
    """The ranges that a rank computes by itself; none where segments are computed one by one."""
    if not plan.fuse_branches:
        return ()
    found: _Ranges = core_plan.cached(("local ranges", plan, rank), lambda: _Ranges(_local_ranges(plan, rank), plan.nbytes))
    return found.ranges


def _local_ranges(plan: ExchangePlan, rank: int) -> tuple[LocalRange, ...]:
    first, branches = plan.cuts[rank], dict[tuple[int, int], list[Branch]]()
    for b in range(len(plan.exchange_pattern.branches)):
        if local := plan.local_branch(b, rank):
            branches.setdefault((local.start, local.stop), []).append(local.branch)
    # Without the keys that segments are padded with: those are added to whole results.
    return tuple(
        LocalRange(start - first, stop - first, plan.pattern.with_branches(*every, tail="exact"), start)
        for (start, stop), some in branches.items()
        for every in [plan.pattern.branches if plan.is_joint else some]
    )


def local_forward(
    op: AttentionOp,
    ranges: tuple[LocalRange, ...],
    is_causal: bool,
    inputs: RankInputs,
    bias: RankBias | None,
) -> tuple[Tensor, Tensor]:
    """`out` like `query`, contiguous, and `lse` `(batch, seq, heads)`; 0 and -inf where nothing is seen within the shard."""
    out, lse, query = None, None, inputs.query
    for r in ranges:
        rows = slice(r.start, r.stop)
        part_out, found_lse = attend(*_call(op, r, is_causal, inputs, bias))
        found_lse = found_lse.transpose(1, 2).contiguous()
        if out is None and part_out.shape == query.shape:
            out, lse = part_out, found_lse
        else:
            out, lse = _no_results(query) if out is None or lse is None else (out, lse)
            _merge(out[:, rows], lse[:, rows], part_out, found_lse)
    return _no_results(query) if out is None or lse is None else (out, lse)


def _call(
    op: AttentionOp, r: LocalRange, is_causal: bool, inputs: RankInputs, bias: RankBias | None
) -> tuple[Inputs, CallOptions]:
    """The call of the rows of a range."""
    rows = slice(r.start, r.stop)
    query, key, value, mask = inputs.of_range(rows)
    part = Inputs(query, key, value, mask, bias=None if bias is None else bias.of_range(rows))
    return op.call(part, r.pattern, is_causal, r.places(len(query)))


def _no_results(query: Tensor) -> tuple[Tensor, Tensor]:
    """The results of queries that see no key."""
    lse = query.new_full(query.shape[:3], -math.inf, dtype=lse_dtype(query.dtype))
    return query.new_zeros(query.shape), lse


def _merge(out: Tensor, lse: Tensor, found: Tensor, found_lse: Tensor) -> None:
    """Merge `found` into `out`, one sequence of the batch after the other: the rows of one lie together."""
    rows = torch.arange(lse.shape[1] * lse.shape[2], device=lse.device)
    for mine, mine_lse, more, more_lse in zip(out, lse, found, found_lse, strict=True):
        flat = mine.view(-1, out.shape[-1])
        merged = PartialResults(flat, mine_lse.view(-1))
        merged.merge(rows, more.reshape(flat.shape), more_lse.reshape(-1))
        flat.copy_(merged.out)


def local_backward(
    op: AttentionOp,
    ranges: tuple[LocalRange, ...],
    is_causal: bool,
    dout: Tensor,
    inputs: RankInputs,
    bias: RankBias | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, contiguous, given the `out` and `lse` `(batch, seq, heads)` of the whole softmax.

    That of the weights of the bias is added to its own.
    """
    grads: tuple[Tensor, ...] | None = None
    for r in ranges:
        rows = slice(r.start, r.stop)
        part_lse = lse[:, rows].transpose(1, 2).contiguous()
        call, options = _call(op, r, is_causal, inputs, bias)
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
