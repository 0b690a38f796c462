"""The forward pass by all-to-all: rows go to the ranks that compute with them, results come back and are merged."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dilkit.comm.passes.all_to_all.index_tables import IndexTables
from dilkit.comm.passes.all_to_all.message_layout import MessageSlice
from dilkit.comm.passes.attention_op import AttentionOp, QKVRows
from dilkit.comm.passes.partial_results import PartialResults
from dilkit.comm.passes.rank_bias import RankBias
from dilkit.comm.passes.rank_inputs import RankInputs
from dilkit.comm.passes.rows import collect_rows, pack_columns, unpack_columns
from dilkit.comm.transports.base import Comm, Pending


class ReceivedRows(NamedTuple):
    """What a rank received in the forward pass, and needs again in the backward pass."""

    rows: Tensor
    flags: Tensor | None = None
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None
    has_values: bool = True

    def as_qkv(self, bias: RankBias | None) -> QKVRows:
        """Queries, keys and values lie in one table."""
        values = self.rows if self.has_values else self.rows.new_zeros(()).expand(self.rows.shape)
        of_tables = None
        if bias is not None and self.query_positions is not None and self.key_positions is not None:
            of_tables = bias.of_tables(self.query_positions, self.key_positions)
        return QKVRows(self.rows, self.rows, values, self.flags, of_tables)

    def without_values(self) -> ReceivedRows:
        """The same, with values that are 0."""
        return self._replace(has_values=False)


class AllToAllForward:
    """A forward pass under way. Making it sends queries, keys and values; then `compute()`, then `merge_into(...)`."""

    def __init__(self, op: AttentionOp, comm: Comm, tables: IndexTables, inputs: RankInputs, bias: RankBias | None) -> None:
        self.op, self.comm, self.tables, self.like, self.bias = op, comm, tables, inputs.query, bias
        sent, received = tables.sent["qkv"], tables.received["qkv"]
        rows = self.like.new_empty(sum(sent.counts), self.like.shape[-1])
        for role, x in zip("qkv", inputs[:3], strict=True):
            write_slices(rows, tables.packed[role], x)
        self.rows = comm.exchange(rows, sent.counts, received.counts, "queries, keys and values")
        mask, (batch, _, heads, _), kv_heads = inputs.mask, self.like.shape, inputs.key.shape[2]
        self.flags = None
        if mask is not None:
            flags = mask[:, :, None, None].expand(*mask.shape, kv_heads, 1)
            self.flags = self._send("k", flags.contiguous(), "key_padding_mask")
        self.query_positions = self.key_positions = None
        if bias is not None:
            self.query_positions = self._send("q", bias.by_head(batch, heads), "positions of queries")
            self.key_positions = self._send("k", bias.by_head(batch, kv_heads), "positions of keys")

    def _send(self, role: str, x: Tensor, step: str) -> Pending:
        """Send what goes with the rows of queries or of keys, `(batch, rows, heads, width)`."""
        sent, received = self.tables.sent[role], self.tables.received[role]
        rows = x.new_empty(sum(sent.counts), x.shape[-1])
        write_slices(rows, self.tables.packed[2 * role], x)
        return self.comm.exchange(rows, sent.counts, received.counts, step)

    def compute(self) -> ReceivedRows:
        """Compute with what this rank received, and send the results."""
        further = self.flags, self.query_positions, self.key_positions
        flags, of_queries, of_keys = (None if pending is None else pending.wait() for pending in further)
        held = ReceivedRows(self.rows.wait(), None if flags is None else flags.view(-1), of_queries, of_keys)
        sent, received = self.tables.sent["q"], self.tables.received["q"]
        found = PartialResults.empty(sum(received.counts), self.like.shape[-1], self.like)
        for stack in self.tables.stacks:
            self.op.forward(found, stack, held.as_qkv(self.bias))
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
