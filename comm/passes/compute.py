"""What a rank computes of small problems whose rows it was sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilkit.comm.passes.calls import Call
from dilkit.comm.passes.partial import Partial
from dilkit.op.operators import backward_op, encode_call, forward_op
from dilkit.pattern import Pattern


@dataclass(frozen=True)
class Rows:
    """Where calls take their rows from: `(n, head_dim)` each, and `flags` `(n,)`, True for keys to be ignored; None: none is."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    flags: Tensor | None


@dataclass(frozen=True)
class Kernel:
    """Attention as told: `backend` names who computes, comma-separated; empty is the automatic choice."""

    scale: float
    backend: str
    requires_grad: bool

    def call(self, pattern: Pattern, is_causal: bool) -> str:
        """What the torch operators are told."""
        return encode_call(pattern, is_causal, self.requires_grad, self.backend)

    def join(self, found: Partial, call: Call, rows: Rows) -> None:
        """Join what the queries of a call see of its keys."""
        out, lse = forward_op(*_inputs(call, rows), self.scale, self.call(call.pattern, call.is_causal))
        out, lse = out.reshape(-1, out.shape[-1]), lse.transpose(1, 2).reshape(-1)
        if call.real_queries is None:
            found.join(call.results, out, lse)
        else:
            found.join(call.results[call.real_queries], out[call.real_queries], lse[call.real_queries])

    def backward(
        self, call: Call, rows: Rows, dout: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Gradients of a call's own rows, given `dout` and `out` `(n, head_dim)` and `lse` `(n,)` of all results.

        `(results, dquery)`: the rows, numbered as results, and theirs; `(keys, dkey, dvalue)`: positions in `call.keys`.
        """
        query, key, value, mask = _inputs(call, rows)
        dout, out, lse = dout[call.results], out[call.results], lse[call.results]
        if call.real_queries is not None:  # the others keep the lse of the query that stands in: exp(score - lse) is at most 1
            dout.masked_fill_(~call.real_queries[:, None], 0.0)
        dout, out, shape = dout.view(query.shape), out.view(query.shape), query.shape[:3]
        lse = lse.view(shape).transpose(1, 2).contiguous()
        told = self.call(call.pattern, call.is_causal)
        grads = backward_op(dout, query, key, value, out, lse, mask, self.scale, told)
        dquery, dkey, dvalue = (grad.reshape(-1, grad.shape[-1]) for grad in grads)
        results, keys = call.results, torch.arange(len(call.keys), device=dkey.device)
        if call.real_queries is not None:
            results, dquery = results[call.real_queries], dquery[call.real_queries]
        if call.real_keys is not None:
            keys, dkey, dvalue = keys[call.real_keys], dkey[call.real_keys], dvalue[call.real_keys]
        return (results, dquery), (keys, dkey, dvalue)


def _inputs(call: Call, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    head_dim = rows.queries.shape[1]
    query = rows.queries.index_select(0, call.queries).view(-1, call.rows, call.width, head_dim)
    key = rows.keys.index_select(0, call.keys).view(-1, call.rows, 1, head_dim)
    value = rows.values.index_select(0, call.values).view(-1, call.rows, 1, head_dim)
    mask = None if rows.flags is None else rows.flags[call.flags]
    if call.real_keys is not None:
        mask = ~call.real_keys if mask is None else mask | ~call.real_keys
    return query, key, value, None if mask is None else mask.view(-1, call.rows)
