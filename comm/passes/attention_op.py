"""The attention operator that a rank applies to its own rows, and to small problems whose rows it received."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilkit.comm.passes.partial_results import PartialResults
from dilkit.comm.passes.problem_stacks import ProblemStack
from dilkit.comm.passes.rank_bias import TableBias
from dilkit.inputs import Inputs
from dilkit.op.call_options import CallOptions
from dilkit.op.dropout import Dropout
from dilkit.op.operators import attend, differentiate
from dilkit.pattern import Pattern


@dataclass(frozen=True)
class QKVRows:
    """Tables that stacks collect their rows from: `(n, head_dim)` each; `flags` `(n,)` is True for masked keys, None: no mask."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    flags: Tensor | None
    bias: TableBias | None = None


@dataclass(frozen=True)
class AttentionOp:
    """Attention with the options that all calls of a pass share.

    `options`: those of the whole. `seed`: that of all ranks where weights are dropped. `first_head`: the number of this rank's
    first query head in the whole model.
    """

    options: CallOptions
    seed: Tensor | None = None
    first_head: int = 0

    @property
    def without_dropout(self) -> AttentionOp:
        """The same with every weight."""
        return replace(self, options=self.options._replace(dropout_p=0.0), seed=None)

    def call(self, inputs: Inputs, pattern: Pattern, is_causal: bool, places: NDArray[np.int64]) -> tuple[Inputs, CallOptions]:
        """Return a call of a part of the whole.

        `places` `(batch, 5)` as `dilkit.op.dropout.Dropout` has them, with heads counted among this rank's.
        """
        form = None if inputs.bias is None else inputs.bias.form
        if self.seed is not None:
            rows = torch.from_numpy(places + np.array([0, self.first_head, 0, 0, 0]))
            inputs = inputs._replace(dropout=Dropout(self.options.dropout_p, self.seed, places=rows))
        return inputs, self.options._replace(pattern=pattern, is_causal=is_causal, bias=form)

    def forward(self, results: PartialResults, stack: ProblemStack, rows: QKVRows) -> None:
        """Merge what the queries of a stack see of its keys into `results`."""
        out, lse = attend(*self._call(stack, rows))
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
        inputs, options = self._call(stack, rows)
        query, head_dim = inputs.query, inputs.query.shape[-1]
        dout, out, lse = dout[stack.results], out[stack.results], lse[stack.results]
        if stack.real_queries is not None:  # the others keep the lse of the query that stands in: exp(score - lse) is at most 1
            dout.masked_fill_(~stack.real_queries[:, None], 0.0)
        dout, out, shape = dout.view(query.shape), out.view(query.shape), query.shape[:3]
        lse = lse.view(shape).transpose(1, 2).contiguous()
        gradients = differentiate(dout, inputs, out, lse, options)
        if rows.bias is not None and rows.bias.form.learned:
            rows.bias.add_gradient(stack, gradients[3])
        dquery, dkey, dvalue = (grad.reshape(-1, head_dim) for grad in gradients[:3])
        results, keys = stack.results, torch.arange(len(stack.keys), device=dkey.device)
        if stack.real_queries is not None:
            results, dquery = results[stack.real_queries], dquery[stack.real_queries]
        if stack.real_keys is not None:
            keys, dkey, dvalue = keys[stack.real_keys], dkey[stack.real_keys], dvalue[stack.real_keys]
        return (results, dquery), (keys, dkey, dvalue)

    def _call(self, stack: ProblemStack, rows: QKVRows) -> tuple[Inputs, CallOptions]:
        head_dim = rows.queries.shape[1]
        query = rows.queries.index_select(0, stack.queries).view(-1, stack.rows, stack.width, head_dim)
        key = rows.keys.index_select(0, stack.keys).view(-1, stack.rows, 1, head_dim)
        value = rows.values.index_select(0, stack.values).view(-1, stack.rows, 1, head_dim)
        mask = None if rows.flags is None else rows.flags[stack.flags]
        if stack.real_keys is not None:
            mask = ~stack.real_keys if mask is None else mask | ~stack.real_keys
        mask, bias = None if mask is None else mask.view(-1, stack.rows), None if rows.bias is None else rows.bias.of_stack(stack)
        return self.call(Inputs(query, key, value, mask, bias=bias), stack.pattern, stack.is_causal, stack.places)
