"""The backward pass by all-to-all: gradients of results go to the ranks that computed them, gradients of rows come back."""

from __future__ import annotations

import torch
from torch import Tensor

from dilkit.comm.passes.all_to_all.forward import ReceivedRows, write_slices
from dilkit.comm.passes.all_to_all.index_tables import IndexTables
from dilkit.comm.passes.all_to_all.message_layout import ReturnTable
from dilkit.comm.passes.attention_op import AttentionOp
from dilkit.comm.passes.rank_bias import RankBias
from dilkit.comm.passes.rows import pack_columns, unpack_columns
from dilkit.comm.transports.base import Comm


class AllToAllBackward:
    """A backward pass under way. Making it sends `dout` to who computes with it; then `compute(...)`, then `add_to(...)`."""

    def __init__(self, op: AttentionOp, comm: Comm, tables: IndexTables, dout: Tensor, out: Tensor, lse: Tensor) -> None:
        """`dout` and `out` `(batch, seq, heads, head_dim)`; `lse` `(batch, seq, heads)`."""
        self.op, self.comm, self.tables = op, comm, tables
        self.columns = (dout.shape[-1], dout.dtype), (out.shape[-1], out.dtype), (1, lse.dtype)
        sent, received = tables.sent["q"], tables.received["q"]
        columns = []
        for x in (dout, out, lse[..., None]):
            rows = x.new_empty(sum(sent.counts), x.shape[-1])
            write_slices(rows, tables.packed["qq"], x)
            columns.append(rows)
        self.rows = comm.exchange(pack_columns(*columns), sent.counts, received.counts, "results and their gradients")

    def compute(self, held: ReceivedRows, bias: RankBias | None) -> None:
        """Compute gradients of what this rank received in the forward pass, and send them to who holds the rows.

        That of the weights of the bias is added to its own.
        """
        dout, out, lse = unpack_columns(self.rows.wait(), *self.columns)
        grads, dqueries = lse.new_zeros(held.rows.shape), lse.new_zeros(dout.shape)
        for stack in self.tables.stacks:
            (results, dquery), (keys, dkey, dvalue) = self.op.backward(stack, held.as_qkv(bias), dout, out, lse[:, 0])
            dqueries[results] += dquery
            grads[stack.keys[keys]] += dkey
            grads[stack.values[keys]] += dvalue
        for stack in self.tables.stacks:  # after all of them: a query may attend to the keys of several stacks
            grads[stack.queries] = dqueries[stack.results]
        sent, received = self.tables.sent["qkv"], self.tables.received["qkv"]
        self.grads = self.comm.exchange(
            grads.to(dout.dtype), received.counts, sent.counts, "gradients of queries, keys and values"
        )

    def add_to(self, dquery: Tensor, dkey: Tensor, dvalue: Tensor) -> None:
        """Add what other ranks computed to the gradients, contiguous `(batch, seq, heads, head_dim)`."""
        rows = self.grads.wait()
        for role, grad in zip("qkv", (dquery, dkey, dvalue), strict=True):
            _accumulate(grad.view(-1, grad.shape[-1]), self.tables.gradients[role], rows)


def _accumulate(grad: Tensor, table: ReturnTable, rows: Tensor) -> None:
    """Add up in fp32, one rank and branch after the other, so that sums are the same each time."""
    wide = grad.dtype if grad.dtype == torch.float64 else torch.float32
    total = grad[table.rows].to(wide)
    for piece in table.slices:
        total[piece.rows] += rows[piece.span]
    grad[table.rows] = total.to(grad.dtype)
