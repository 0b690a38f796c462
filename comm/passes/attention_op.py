"""The attention operator that a rank applies to its own rows, and to small problems whose rows it received."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilkit.bias.form import BiasForm
from dilkit.comm.passes.partial_results import PartialResults
from dilkit.comm.passes.problem_stacks import ProblemStack
from dilkit.comm.passes.rank_bias import TableBias
from dilkit.op.operators import backward_op, encode_call, forward_op
from dilkit.pattern import Pattern


@dataclass(frozen=True)
class QKVRows:
    """Tables that stacks collect their rows from: `(n, head_dim)` each; `flags` `(n,)` is True for masked keys, None: no mask."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    flags: Tensor | None
    bias: TableBias | None = None

    def bias_of(self, stack: ProblemStack) -> dict[str, Tensor]:
        """What the torch operators are given for the bias of a stack; nothing where there is none."""
        return {} if self.bias is None else self.bias.of_stack(stack)


@dataclass(frozen=True)
class AttentionOp:
    """Attention with the options that all calls of a pass share.

    `backend` names who computes, comma-separated; empty is the automatic choice. `seed`: that of all ranks where weights are
    dropped; `first_head`: the number in the whole model of this rank's first query head. `softcap`: 0 for none. `bias`: that of
    the whole.
    """

    scale: float
    backend: str
    requires_grad: bool
    dropout_p: float = 0.0
    seed: Tensor | None = None
    first_head: int = 0
    softcap: float = 0.0
    bias: BiasForm | None = None

    @property
    def without_dropout(self) -> AttentionOp:
        """The same with every weight."""
        return replace(self, dropout_p=0.0, seed=None)

    def encode(self, pattern: Pattern, is_causal: bool, bias: BiasForm | None) -> str:
        """The options as the torch operators take them: one string."""
        return encode_call(pattern, is_causal, self.requires_grad, self.backend, self.dropout_p, self.softcap, bias)

    def encode_stack(self, stack: ProblemStack, rows: QKVRows) -> str:
        """Those of a stack."""
        return self.encode(stack.pattern, stack.is_causal, None if rows.bias is None else rows.bias.form)

    def dropout(self, places: NDArray[np.int64]) -> dict[str, Tensor]:
        """What the torch operators are given for dropout; nothing where there is none.

        `places` `(batch, 5)` as `dilkit.op.dropout.Dropout` has them, with heads counted among this rank's.
        """
        if self.seed is None:
            return {}
        return dict(dropout_seed=self.seed, dropout_places=torch.from_numpy(places + np.array([0, self.first_head, 0, 0, 0])))

    def forward(self, results: PartialResults, stack: ProblemStack, rows: QKVRows) -> None:
        """Merge what the queries of a stack see of its keys into `results`."""
        further = {**self.dropout(stack.places), **rows.bias_of(stack)}
        out, lse = forward_op(*_inputs(stack, rows), self.scale, self.encode_stack(stack, rows), **further)
        out, lse = out.reshape(-1, out.shape[-1]), lse.transpose(1, 2).reshape(-1)
        if stack.real_queries is None:
            results.merge(stack.results, out, lse)
        else:
            results.merge(stack.results[stack.real_queries], out[stack.real_queries], lse[stack.real_queries])

    def backward(
        self, stack: ProblemStack, rows: QKVRows, dout: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Gradients of a stack's own rows, given `dout` and `out` `(n, head_dim)` and `lse` `(n,)` of all results.

        Returns `(results, dquery)`: row numbers among the results, and their gradients; and `(keys, dkey, dvalue)`: positions in
        `stack.keys`, and theirs.
        """
        query, key, value, mask = _inputs(stack, rows)
        dout, out, lse = dout[stack.results], out[stack.results], lse[stack.results]
        if stack.real_queries is not None:  # the others keep the lse of the query that stands in: exp(score - lse) is at most 1
            dout.masked_fill_(~stack.real_queries[:, None], 0.0)
        dout, out, shape = dout.view(query.shape), out.view(query.shape), query.shape[:3]
        lse = lse.view(shape).transpose(1, 2).contiguous()
        options, further = self.encode_stack(stack, rows), {**self.dropout(stack.places), **rows.bias_of(stack)}
        *grads, dweights = backward_op(dout, query, key, value, out, lse, mask, self.scale, options, **further)
        if rows.bias is not None:
            rows.bias.add_gradient(stack, dweights)
        dquery, dkey, dvalue = (grad.reshape(-1, grad.shape[-1]) for grad in grads)
        results, keys = stack.results, torch.arange(len(stack.keys), device=dkey.device)
        if stack.real_queries is not None:
            results, dquery = results[stack.real_queries], dquery[stack.real_queries]
        if stack.real_keys is not None:
            keys, dkey, dvalue = keys[stack.real_keys], dkey[stack.real_keys], dvalue[stack.real_keys]
        return (results, dquery), (keys, dkey, dvalue)


def _inputs(stack: ProblemStack, rows: QKVRows) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    head_dim = rows.queries.shape[1]
    query = rows.queries.index_select(0, stack.queries).view(-1, stack.rows, stack.width, head_dim)
    key = rows.keys.index_select(0, stack.keys).view(-1, stack.rows, 1, head_dim)
    value = rows.values.index_select(0, stack.values).view(-1, stack.rows, 1, head_dim)
    mask = None if rows.flags is None else rows.flags[stack.flags]
    if stack.real_keys is not None:
        mask = ~stack.real_keys if mask is None else mask | ~stack.real_keys
    return query, key, value, None if mask is None else mask.view(-1, stack.rows)
