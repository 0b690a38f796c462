"""The backward pass by all-to-all: gradients of results go to the ranks that computed them, gradients of rows come back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dilkit.comm.passes.all_to_all.index_tables import IndexTables
from dilkit.comm.passes.all_to_all.message_layout import ReturnTable
from dilkit.comm.passes.all_to_all.received_rows import ReceivedRows, SentRows, write_slices
from dilkit.comm.passes.attention_op import AttentionOp
from dilkit.comm.passes.rank_bias import RankBias
from dilkit.comm.passes.rank_inputs import RankInputs
from dilkit.comm.passes.rows import add_rows, pack_columns, unpack_columns
from dilkit.comm.transports.base import Comm, Pending
from dilkit.op.free_memory import give_memory_back


class Results(NamedTuple):
    """Of a rank's own rows: `dout` and `out` `(batch, seq, heads, head_dim)`, `lse` `(batch, seq, heads)`."""

    dout: Tensor
    out: Tensor
    lse: Tensor


class AllToAllBackward:
    """A backward pass in which a rank computes with rows that it kept, or in `rounds` with rows that are sent again.

    kept     making it sends `dout`     compute(...)             add_to(...), which waits for gradients
    again                               compute_anew(...)        add_to(...)
    """

    def __init__(self, op: AttentionOp, comm: Comm, rounds: tuple[IndexTables, ...], results: Results, keeps_rows: bool) -> None:
        self.op, self.comm, self.rounds, self.results = op, comm, rounds, results
        self.under_way = [self._send(tables) for tables in rounds] if keeps_rows else []
        self.returned: list[tuple[int, Pending]] = []
        self.sums: dict[str, Tensor] = {}
        roles = rounds[0].returned if rounds else ""
        self.places = {role: ReturnTable.joined([tables.gradients[role] for tables in rounds]) for role in roles}

    def compute(self, held: ReceivedRows, bias: RankBias | None) -> None:
        """Compute gradients of what this rank received in the forward pass, and send them to who holds the rows.

        That of the weights of the bias is added to its own.
        """
        (tables,) = self.rounds
        self.returned.append((0, self._gradients(tables, held, bias)))

    def compute_anew(self, inputs: RankInputs, bias: RankBias | None) -> None:
        """The same of rows that are sent again. Those of one round lie there at a time, beside the sums of what was returned."""
        for number, tables in enumerate(self.rounds):
            self.returned.append((number, self._gradients_anew(tables, inputs, bias)))
            self.sums = {role: self._sum(role) for role in self.places}
            self.returned.clear()
        if self.rounds and self.results.out.device.type == "cpu":
            give_memory_back()  # buffers of a few MiB are gaps in the heap, which the local gradients may not fit into

    def add_to(self, dquery: Tensor, dkey: Tensor, dvalue: Tensor) -> None:
        """Add what other ranks computed to the gradients, contiguous `(batch, seq, heads, head_dim)`, that are asked for."""
        by_role = dict(q=dquery, k=dkey, v=dvalue)
        for role, (rows, _) in self.places.items():
            add_rows(by_role[role], rows, self._sum(role))

    def _send(self, tables: IndexTables) -> Pending:
        """Send gradients of results to who computes with them."""
        sent, received = tables.sent["q"], tables.received["q"]
        columns = []
        for x in (self.results.dout, self.results.out, self.results.lse[..., None]):
            rows = x.new_empty(sum(sent.counts), x.shape[-1])
            write_slices(rows, tables.packed["qq"], x)
            columns.append(rows)
        return self.comm.exchange(pack_columns(*columns), sent.counts, received.counts, "results and their gradients")

    def _received(self) -> Results:
        """What was sent last, `(n, head_dim)` and `(n,)`."""
        d, dtype, lse_dtype = self.results.out.shape[-1], self.results.out.dtype, self.results.lse.dtype
        dout, out, lse = unpack_columns(self.under_way.pop().wait(), (d, dtype), (d, dtype), (1, lse_dtype))
        return Results(dout, out, lse[:, 0])

    def _gradients_anew(self, tables: IndexTables, inputs: RankInputs, bias: RankBias | None) -> Pending:
        """Those of the rows of a round, which are sent for it, on their way back."""
        sent = SentRows(self.comm, tables, inputs, bias)
        self.under_way.append(self._send(tables))
        return self._gradients(tables, sent.wait(), bias)

    def _gradients(self, tables: IndexTables, held: ReceivedRows, bias: RankBias | None) -> Pending:
        """Those of the rows of a round, on their way back."""
        results = self._received()
        grads, dqueries = results.lse.new_zeros(held.rows.shape), results.lse.new_zeros(results.dout.shape)
        for stack in tables.stacks:
            (rows, dquery), (keys, dkey, dvalue) = self.op.backward(stack, held.as_qkv(bias), *results)
            dqueries[rows] += dquery
            grads[stack.keys[keys]] += dkey
            grads[stack.values[keys]] += dvalue
        for stack in tables.stacks:  # after all of them: a query may attend to the keys of several stacks
            grads[stack.queries] = dqueries[stack.results]
        sent, received = tables.sent[tables.returned], tables.received[tables.returned]
        if tables.returned != "qkv":
            grads = torch.cat([grads[:0], *(grads[span] for span in tables.received["qkv"].spans(tables.returned))])
        grads = grads.to(results.dout.dtype)
        return self.comm.exchange(grads, received.counts, sent.counts, "gradients of queries, keys and values")

    def _sum(self, role: str) -> Tensor:
        """What was returned for a role so far, in fp32: one branch and rank after the other, so that it is the same each time."""
        (rows, by_round), d = self.places[role], self.results.out.shape[-1]
        total = self.sums.pop(role) if role in self.sums else self.results.lse.new_zeros(len(rows), d)
        for number, pending in self.returned:
            message = pending.wait()
            for piece in by_round[number]:
                total[piece.rows] += message[piece.span]
        return total
