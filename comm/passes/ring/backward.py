"""The backward pass of a ring schedule: blocks rotate as in the forward pass, and their gradients return in one hop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilkit.comm.passes.attention_op import AttentionOp
from dilkit.comm.passes.rank_bias import RankBias
from dilkit.comm.passes.rank_inputs import RankInputs
from dilkit.comm.passes.ring.forward import block_rows, own_positions
from dilkit.comm.passes.ring.kv_rotation import KVBlock, KVRotation, RowTransfer
from dilkit.comm.passes.ring.segment import RingTables, ring_branch
from dilkit.comm.passes.rows import collect_rows
from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.transports.base import Comm


@dataclass
class RingGradients:
    """The gradient accumulators of one segment, in fp32 (fp64 for fp64): rows of queries and of keys by number, and theirs."""

    queries: Tensor
    dquery: Tensor
    keys: Tensor
    dkey: Tensor
    dvalue: Tensor

    def add_block(self, grads: Tensor, roles: str) -> None:
        """Add gradients of this rank's own block, of keys and of values side by side, or of one of them alone."""
        totals = [dict(k=self.dkey, v=self.dvalue)[role] for role in roles]
        for total, more in zip(totals, grads.chunk(len(roles) or 1, dim=1), strict=False):
            total += more.to(total.dtype)


def ring_backward(
    op: AttentionOp, comm: Comm, plan: ExchangePlan, branch: int, inputs: RankInputs, bias: RankBias | None,
    dout: Tensor, out: Tensor, lse: Tensor, gradients: str,
) -> list[RingGradients]:  # fmt: skip
    """Gradients through a branch; `dout` and `out` like `query`, `lse` `(batch, seq, heads)` of this rank's rows.

    Those of keys and values are whole where they are among the `gradients` that are asked for. That of the weights of the bias is
    added to its own.
    """
    query = inputs.query
    ring = ring_branch(plan, branch, comm.rank, len(query), query.device, bias is not None)
    backward = _RingBackward(op, comm, ring.tables, inputs, bias, dout, out, lse, gradients)
    for hop, blocks in KVRotation(comm, ring, inputs, bias):
        backward.hop(hop, blocks)
    backward.receive()
    return backward.found


class _RingBackward:
    """The backward pass of a ring under way."""

    def __init__(
        self,
        op: AttentionOp,
        comm: Comm,
        tables: Sequence[RingTables],
        inputs: RankInputs,
        bias: RankBias | None,
        dout: Tensor,
        out: Tensor,
        lse: Tensor,
        gradients: str,
    ) -> None:
        self.op, self.comm, self.tables, self.bias = op, comm, tables, bias
        self.found: list[RingGradients] = []
        self.own: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.positions: list[Tensor | None] = []
        self.transfer: RowTransfer | None = None
        self.expected: list[int] = []
        query, d = inputs.query, inputs.query.shape[-1]
        self.roles = gradients.replace("q", "")
        self.like = inputs.key.new_empty(0, len(self.roles) * d)
        for one in tables:
            rows, keys = one.queries, one.keys
            own = (collect_rows(query, rows), collect_rows(dout, rows), collect_rows(out, rows))
            self.own.append((*own, lse.reshape(-1)[rows]))
            self.positions.append(own_positions(bias, query, rows))
            zeros = [lse.new_zeros(len(x), d) for x in (rows, keys, keys)]
            self.found.append(RingGradients(rows, zeros[0], keys, zeros[1], zeros[2]))

    def hop(self, hop: int, blocks: list[KVBlock | None]) -> None:
        """Compute with these blocks, and begin to return their gradients to the ranks that hold them."""
        sends = []
        for i, (tables, block) in enumerate(zip(self.tables, blocks, strict=True)):
            if block is not None:
                grads = self._compute(i, tables, hop, block)
                if hop == 0:
                    self.found[i].add_block(grads, self.roles)
                else:
                    sends.append((tables.segment.neighbour(-hop), grads.to(self.like.dtype)))
        self.receive()
        if hop:
            self.expected = [i for i, one in enumerate(self.tables) if one.segment.reaches(hop)]
            receives = [(self.tables[i].segment.neighbour(hop), len(self.found[i].keys)) for i in self.expected]
            step = f"gradients of keys and values, hop {hop}"
            self.transfer = RowTransfer.begin(self.comm, sends, receives, self.like, step)

    def receive(self) -> None:
        """Add what other ranks computed for the blocks of this rank."""
        if self.transfer is not None:
            for i, grads in zip(self.expected, self.transfer.wait(), strict=True):
                self.found[i].add_block(grads, self.roles)
        self.transfer = None

    def _compute(self, i: int, tables: RingTables, hop: int, block: KVBlock) -> Tensor:
        """The gradients of a block that are asked for, `(n, width)`; those of the queries are added up here."""
        query, dout, out, lse = self.own[i]
        grads = lse.new_zeros(len(block.keys), self.like.shape[1])
        table_rows = block_rows(query, self.positions[i], block, self.bias)
        for stack in tables.stacks_at(hop):
            (rows, dquery), (keys, dkey, dvalue) = self.op.backward(stack, table_rows, dout, out, lse)
            self.found[i].dquery[rows] += dquery
            grads[stack.keys[keys]] += torch.cat([dkey[:, :0], *(dict(k=dkey, v=dvalue)[role] for role in self.roles)], dim=1)
        return grads
