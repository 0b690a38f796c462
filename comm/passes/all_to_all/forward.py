"""The forward pass by all-to-all: rows go to the ranks that compute with them, results come back and are merged."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dilkit.comm.passes.all_to_all.index_tables import IndexTables
from dilkit.comm.passes.all_to_all.message_layout import MessageSlice
from dilkit.comm.passes.attention_op import AttentionOp, QKVRows
from dilkit.comm.passes.partial_results import PartialResults
from dilkit.comm.passes.rows import collect_rows, pack_columns, unpack_columns
from dilkit.comm.transports.base import Comm, Pending


class ReceivedRows(NamedTuple):
    """What a rank received in the forward pass, and needs again in the backward pass."""

    rows: Tensor
    flags: Tensor | None
    has_values: bool = True

    def as_qkv(self) -> QKVRows:
        """Queries, keys and values lie in one table."""
        values = self.rows if self.has_values else self.rows.new_zeros(()).expand(self.rows.shape)
        return QKVRows(self.rows, self.rows, values, self.flags)

    def without_values(self) -> ReceivedRows:
        """The same, with values that are 0."""
        return self._replace(has_values=False)


class AllToAllForward:
    """A forward pass under way. Making it sends queries, keys and values; then `compute()`, then `merge_into(...)`."""

    def __init__(
        self, op: AttentionOp, comm: Comm, tables: IndexTables, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> None:
        self.op, self.comm, self.tables, self.like = op, comm, tables, query
        sent, received = tables.sent["qkv"], tables.received["qkv"]
        rows = query.new_empty(sum(sent.counts), query.shape[-1])
        for role, x in zip("qkv", (query, key, value), strict=True):
            write_slices(rows, tables.packed[role], x)
        self.rows = comm.exchange(rows, sent.counts, received.counts, "queries, keys and values")
        self.flags = None if mask is None else self._send_flags(mask, key.shape[2])

    def _send_flags(self, mask: Tensor, heads: int) -> Pending:
        sent, received = self.tables.sent["k"], self.tables.received["k"]
        flags = mask.new_empty(sum(sent.counts), 1)
        write_slices(flags, self.tables.packed["kk"], mask[:, :, None, None].expand(*mask.shape, heads, 1).contiguous())
        return self.comm.exchange(flags, sent.counts, received.counts, "key_padding_mask")

    def compute(self) -> ReceivedRows:
        """Compute with what this rank received, and send the results."""
        held = ReceivedRows(self.rows.wait(), None if self.flags is None else self.flags.wait().view(-1))
        sent, received = self.tables.sent["q"], self.tables.received["q"]
        found = PartialResults.empty(sum(received.counts), self.like.shape[-1], self.like)
        for stack in self.tables.stacks:
            self.op.forward(found, stack, held.as_qkv())
        results = pack_columns(found.out.to(self.like.dtype), found.lse[:, None])
        self.results = self.comm.exchange(results, received.counts, sent.counts, "results")
        return held

    def merge_into(self, out: Tensor, lse: Tensor) -> None:
        """Merge the results into `out` `(batch, seq, heads, head_dim)` and `lse` `(batch, seq, heads)`, both contiguous."""
        table, d = self.tables.results, out.shape[-1]
        returned, returned_lse = unpack_columns(self.results.wait(), (d, out.dtype), (1, lse.dtype))
        out, lse = out.view(-1, d), lse.view(-1)
        merged = PartialResults(out[table.rows], lse[table.rows])
        for piece in table.slices:
            merged.merge(piece.rows, returned[piece.span], returned_lse[piece.span, 0])
        out[table.rows], lse[table.rows] = merged.out.to(out.dtype), merged.lse


def write_slices(message: Tensor, slices: list[MessageSlice], x: Tensor) -> None:
    """Write the rows of `x` to where messages have them."""
    for piece in slices:
        message[piece.span] = collect_rows(x, piece.rows)
