"""The passes by all-to-all: rows go to the ranks that compute with them, and what these compute comes back.

forward     queries, keys, values  ----->  small problems  ----->  results, merged by lse
backward    results, their gradients ---->  small problems  ----->  gradients, added up
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dilkit.comm.passes.attention_op import AttentionOp, QKVRows, merge_rows, no_results
from dilkit.comm.passes.index_tables import IndexTables, Slices, joined
from dilkit.comm.passes.rank_bias import RankBias
from dilkit.comm.passes.row_index import add_rows, collect_rows, pack_columns, unpack_columns
from dilkit.comm.transports.base import Comm, Pending
from dilkit.inputs import Inputs
from dilkit.op.free_memory import give_memory_back

Receive = Callable[[], QKVRows]


def all_to_all_forward(
    op: AttentionOp,
    comm: Comm,
    rounds: tuple[IndexTables, ...],
    first: list[Receive],
    inputs: Inputs,
    bias: RankBias | None,
) -> tuple[QKVRows | None, list[Pending]]:
    """Compute with the rows that this rank receives, and send the results. Those of the `first` round are under way."""
    held, results = None, []
    for tables in rounds:
        held = None  # before those of this round arrive
        held = (first.pop() if first else send_rows(comm, tables, inputs, bias))()
        results.append(_send_results(op, comm, tables, inputs.query, held, bias))
    return held, results


def _send_results(
    op: AttentionOp, comm: Comm, tables: IndexTables, query: Tensor, held: QKVRows, bias: RankBias | None
) -> Pending:
    results = no_results(sum(tables.received["q"]), query.shape[-1], query)
    for stack in tables.stacks:
        op.forward(results, stack, held, bias)
    packed = pack_columns(results[0].to(query.dtype), results[1][:, None])
    return comm.exchange(packed, tables.received["q"], tables.sent["q"], "results")


def merge_results(rounds: tuple[IndexTables, ...], results: list[Pending], out: Tensor, lse: Tensor) -> None:
    """Merge results into `out` `(batch, seq, heads, head_dim)` and `lse` `(batch, seq, heads)`, both contiguous."""
    columns, (rows, by_round) = ((out.shape[-1], out.dtype), (1, lse.dtype)), joined([tables.results for tables in rounds])

    def parts() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for slices, pending in zip(by_round, results, strict=True):
            returned, returned_lse = unpack_columns(pending.wait(), *columns)
            for span, places in slices:
                yield places, returned[span], returned_lse[span, 0]

    merge_rows(out, lse, rows, parts())


class AllToAllBackward:
    """A backward pass in which a rank computes with rows that it kept, or in `rounds` with rows that are sent again.

    kept     making it sends `dout`     compute(...)             add_to(...), which waits for gradients
    again                               compute_anew(...)        add_to(...)

    Of a rank's own rows, `dout` and `out` are `(batch, seq, heads, head_dim)`, `lse` is `(batch, seq, heads)`.
    """

    def __init__(
        self,
        op: AttentionOp,
        comm: Comm,
        rounds: tuple[IndexTables, ...],
        dout: Tensor,
        out: Tensor,
        lse: Tensor,
        keeps_rows: bool,
    ) -> None:
        self.op, self.comm, self.rounds, self.results = op, comm, rounds, (dout, out, lse)
        self.under_way = [self._send(tables) for tables in rounds] if keeps_rows else []
        self.returned: list[tuple[int, Pending]] = []
        self.sums: dict[str, Tensor] = {}
        roles = rounds[0].returned if rounds else ""
        self.places = {role: joined([tables.gradients[role] for tables in rounds]) for role in roles}

    def compute(self, held: QKVRows, bias: RankBias | None) -> None:
        """Compute gradients of what this rank received in the forward pass, and send them to who holds the rows."""
        (tables,) = self.rounds
        self.returned.append((0, self._gradients(tables, held, bias)))

    def compute_anew(self, inputs: Inputs, bias: RankBias | None) -> None:
        """Compute the same of rows that are sent again. Those of one round lie there at a time, beside the sums of gradients."""
        for number, tables in enumerate(self.rounds):
            receive = send_rows(self.comm, tables, inputs, bias)
            self.under_way.append(self._send(tables))
            self.returned.append((number, self._gradients(tables, receive(), bias)))
            self.sums = {role: self._sum(role) for role in self.places}
            self.returned.clear()
        if self.rounds and self.results[0].device.type == "cpu":
            give_memory_back()  # buffers of a few MiB are gaps in the heap, which the local gradients may not fit into

    def add_to(self, dquery: Tensor, dkey: Tensor, dvalue: Tensor) -> None:
        """Add what other ranks computed to the gradients, contiguous `(batch, seq, heads, head_dim)`, that are asked for."""
        by_role = dict(q=dquery, k=dkey, v=dvalue)
        for role, (rows, _) in self.places.items():
            add_rows(by_role[role], rows, self._sum(role))

    def _send(self, tables: IndexTables) -> Pending:
        dout, out, lse = self.results
        columns = [_packed(x, sum(tables.sent["q"]), tables.packed["qq"]) for x in (dout, out, lse[..., None])]
        return self.comm.exchange(pack_columns(*columns), tables.sent["q"], tables.received["q"], "results and their gradients")

    def _gradients(self, tables: IndexTables, held: QKVRows, bias: RankBias | None) -> Pending:
        """Compute the gradients of the rows of a round, and send them back. Queries, keys and values lie in one table."""
        _, own_out, own_lse = self.results
        columns = (own_out.shape[-1], own_out.dtype), (own_out.shape[-1], own_out.dtype), (1, own_lse.dtype)
        dout, out, lse = unpack_columns(self.under_way.pop().wait(), *columns)  # of the queries that this rank computed
        lse = lse[:, 0]
        grads, dqueries = lse.new_zeros(held.queries.shape), lse.new_zeros(dout.shape)
        for stack in tables.stacks:
            (rows, dquery), (keys, dkey, dvalue) = self.op.backward(stack, held, bias, dout, out, lse)
            dqueries[rows] += dquery
            grads[stack.keys[keys]] += dkey
            grads[stack.values[keys]] += dvalue
        for stack in tables.stacks:  # after all of them: a query may attend to the keys of several stacks
            grads[stack.queries] = dqueries[stack.results]
        sent, received = tables.sent[tables.returned], tables.received[tables.returned]
        if tables.returned != "qkv":
            grads = torch.cat([grads[:0], *(grads[span] for span in tables.returned_spans)])
        return self.comm.exchange(grads.to(dout.dtype), received, sent, "gradients of queries, keys and values")

    def _sum(self, role: str) -> Tensor:
        """Sum up what was returned for a role so far, in fp32: one branch and rank after the other, the same each time."""
        (rows, by_round), (_, out, lse) = self.places[role], self.results
        total = self.sums.pop(role) if role in self.sums else lse.new_zeros(len(rows), out.shape[-1])
        for number, pending in self.returned:
            message = pending.wait()
            for span, places in by_round[number]:
                total[places] += message[span]
        return total


def send_rows(comm: Comm, tables: IndexTables, inputs: Inputs, bias: RankBias | None) -> Receive:
    """Send rows of queries, keys and values, with what goes with them. Return a function that waits for those received."""

    def send(role: str, x: Tensor, step: str) -> Pending:
        rows = _packed(x, sum(tables.sent[role]), tables.packed[2 * role])
        return comm.exchange(rows, tables.sent[role], tables.received[role], step)

    message = inputs.query.new_empty(sum(tables.sent["qkv"]), inputs.query.shape[-1])
    for role, x in zip("qkv", inputs[:3], strict=True):
        _write(message, tables.packed[role], x)
    rows = comm.exchange(message, tables.sent["qkv"], tables.received["qkv"], "queries, keys and values")
    mask, (batch, _, heads, _), kv_heads = inputs.key_padding_mask, inputs.query.shape, inputs.key.shape[2]
    flags = query_positions = key_positions = None
    if mask is not None:
        flags = send("k", mask[:, :, None, None].expand(*mask.shape, kv_heads, 1).contiguous(), "key_padding_mask")
    if bias is not None:
        query_positions = send("q", bias.by_head(batch, heads), "positions of queries")
        key_positions = send("k", bias.by_head(batch, kv_heads), "positions of keys")

    def receive() -> QKVRows:
        received, *positions = (
            None if pending is None else pending.wait() for pending in (flags, query_positions, key_positions)
        )
        table = rows.wait()
        return QKVRows(table, table, table, None if received is None else received.view(-1), *positions)

    return receive


def _packed(x: Tensor, rows: int, slices: Slices) -> Tensor:
    message = x.new_empty(rows, x.shape[-1])
    _write(message, slices, x)
    return message


def _write(message: Tensor, slices: Slices, x: Tensor) -> None:
    for span, rows in slices:
        message[span] = collect_rows(x, rows)
