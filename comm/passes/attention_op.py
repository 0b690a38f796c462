"""The attention operator that a rank applies to its own rows and to small problems, and the partial results that it merges."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilkit.comm.passes._rows import merge
from dilkit.comm.passes.problem_stacks import ProblemStack
from dilkit.comm.passes.rank_bias import RankBias
from dilkit.comm.plan.exchange_plan import LocalRange
from dilkit.inputs import Inputs
from dilkit.op.boundary import lse_dtype
from dilkit.op.call_options import CallOptions
from dilkit.op.dropout import Dropout
from dilkit.op.operators import attend, differentiate
from dilkit.pattern import Pattern

PartialResults = tuple[Tensor, Tensor]
"""Attention over some of the keys: `out` `(rows, head_dim)` and `lse` `(rows,)`, in fp32 (fp64 for fp64)."""


class QKVRows(NamedTuple):
    """Tables that stacks collect their rows from: `(n, head_dim)` each; one may be all three.

    `flags` `(n,)` is True for masked keys, None: no mask. Positions `(n, dims)` of queries and of keys go with a bias.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    flags: Tensor | None = None
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None


@dataclass(frozen=True)
class AttentionOp:
    """Attention with the options of the whole call; `seed` of dropout, `first_head` of the rank in the model."""

    options: CallOptions
    seed: Tensor | None = None
    first_head: int = 0

    def call(self, inputs: Inputs, pattern: Pattern, is_causal: bool, places: NDArray[np.int64]) -> tuple[Inputs, CallOptions]:
        """Return a call of a part of the whole; `places` `(batch, 5)` as `Dropout` has them, by heads of this rank."""
        form = None if inputs.bias is None else inputs.bias.form
        if self.seed is not None:
            rows = torch.from_numpy(places + np.array([0, self.first_head, 0, 0, 0]))
            inputs = inputs._replace(dropout=Dropout(self.options.dropout_p, self.seed, places=rows))
        return inputs, self.options._replace(pattern=pattern, is_causal=is_causal, bias=form)

    def forward(self, results: PartialResults, stack: ProblemStack, rows: QKVRows, bias: RankBias | None) -> None:
        """Merge what the queries of a stack see of its keys into `results`."""
        out, lse = attend(*self._call(stack, rows, bias))
        out, lse = out.reshape(-1, out.shape[-1]), lse.transpose(1, 2).reshape(-1)
        if stack.real_queries is None:
            merge_into(results, stack.results, out, lse)
        else:
            real = stack.real_queries
            merge_into(results, stack.results[real], out[real], lse[real])

    def backward(
        self, stack: ProblemStack, rows: QKVRows, bias: RankBias | None, dout: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Return the gradients of a stack's own rows, given `dout`, `out` and `lse` of all results.

        These are `(results, dquery)`, row numbers and gradients, and `(keys, dkey, dvalue)`, positions in `stack.keys` and
        gradients.
        """
        inputs, options = self._call(stack, rows, bias)
        query, head_dim = inputs.query, inputs.query.shape[-1]
        dout, out, lse = dout[stack.results], out[stack.results], lse[stack.results]
        if stack.real_queries is not None:  # the others keep the lse of the query that stands in: exp(score - lse) is at most 1
            dout.masked_fill_(~stack.real_queries[:, None], 0.0)
        dout, out, shape = dout.view(query.shape), out.view(query.shape), query.shape[:3]
        lse = lse.view(shape).transpose(1, 2).contiguous()
        gradients = differentiate(dout, inputs, out, lse, options)
        if bias is not None and bias.form.learned:
            bias.gradient[stack.heads] += gradients[3]
        dquery, dkey, dvalue = (grad.reshape(-1, head_dim) for grad in gradients[:3])
        results, keys = stack.results, torch.arange(len(stack.keys), device=dkey.device)
        if stack.real_queries is not None:
            results, dquery = results[stack.real_queries], dquery[stack.real_queries]
        if stack.real_keys is not None:
            keys, dkey, dvalue = keys[stack.real_keys], dkey[stack.real_keys], dvalue[stack.real_keys]
        return (results, dquery), (keys, dkey, dvalue)

    def _call(self, stack: ProblemStack, rows: QKVRows, bias: RankBias | None) -> tuple[Inputs, CallOptions]:
        head_dim = rows.queries.shape[1]
        query = rows.queries.index_select(0, stack.queries).view(-1, stack.rows, stack.width, head_dim)
        key = rows.keys.index_select(0, stack.keys).view(-1, stack.rows, 1, head_dim)
        value = rows.values.index_select(0, stack.values).view(-1, stack.rows, 1, head_dim)
        mask = None if rows.flags is None else rows.flags[stack.flags]
        if stack.real_keys is not None:
            mask = ~stack.real_keys if mask is None else mask | ~stack.real_keys
        mask = None if mask is None else mask.view(-1, stack.rows)
        of_stack = None if bias is None else bias.of_stack(stack, rows.query_positions, rows.key_positions)
        return self.call(Inputs(query, key, value, mask, bias=of_stack), stack.pattern, stack.is_causal, stack.places)


def no_results(rows: int, head_dim: int, like: Tensor) -> PartialResults:
    """Return results of rows that have seen no key: `out = 0`, `lse = -inf`, on the device of `like` and for its dtype."""
    dtype = lse_dtype(like.dtype)
    return like.new_zeros(rows, head_dim, dtype=dtype), like.new_full((rows,), -math.inf, dtype=dtype)


def merge_into(results: PartialResults, rows: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge results over further keys, `out` `(n, head_dim)`, `lse` `(n,)`, into the rows `rows`, each at most once.

    lse' = log(exp(lse) + exp(lse_b))      out' = exp(lse - lse') out + exp(lse_b - lse') out_b
    """
    all_out, all_lse = results
    out = out.to(all_out.dtype)
    if not out.is_cuda:
        merge(*[x.detach().contiguous().numpy() for x in (all_out, all_lse, rows, out, lse)])
        return
    before = all_lse[rows]
    after = torch.logaddexp(before, lse)
    shift = after.masked_fill(after == -math.inf, 0.0)  # -inf - -inf is no number, exp(-inf - 0) is 0
    old, new = torch.exp(before - shift), torch.exp(lse - shift)
    all_out[rows] = old[:, None] * all_out[rows] + new[:, None] * out
    all_lse[rows] = after


def merge_rows(out: Tensor, lse: Tensor, rows: Tensor, parts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Merge into the rows `rows`, as `(batch * seq * heads)` numbers, of `out` and `lse`, contiguous.

    `parts` are `(places, out, lse)`: places among `rows`, each at most once, and results over further keys.
    """
    flat, flat_lse = out.view(-1, out.shape[-1]), lse.view(-1)
    merged = flat[rows].to(lse.dtype), flat_lse[rows]
    for part in parts:
        merge_into(merged, *part)
    flat[rows], flat_lse[rows] = merged[0].to(out.dtype), merged[1]


def local_forward(
    op: AttentionOp,
    ranges: tuple[LocalRange, ...],
    is_causal: bool,
    inputs: Inputs,
    bias: RankBias | None,
) -> tuple[Tensor, Tensor]:
    """Compute `out` like `query`, contiguous, and `lse` `(batch, seq, heads)`; 0 and -inf where the shard shows no key."""
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


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge `part` into `out`, one sequence of the batch after the other: the rows of one lie together."""
    rows = torch.arange(lse.shape[1] * lse.shape[2], device=lse.device)
    for mine, mine_lse, more, more_lse in zip(out, lse, part, part_lse, strict=True):
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
    """Return gradients of query, key and value, given `out` and `lse` `(batch, seq, heads)`; add that of the bias to its own."""
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
