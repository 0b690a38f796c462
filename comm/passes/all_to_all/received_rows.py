"""Rows of queries, keys and values on their way to the ranks that compute with them, and as these have received them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dilkit.comm.passes.all_to_all.index_tables import IndexTables
from dilkit.comm.passes.all_to_all.message_layout import MessageSlice
from dilkit.comm.passes.attention_op import QKVRows
from dilkit.comm.passes.rank_bias import RankBias
from dilkit.comm.passes.rank_inputs import RankInputs
from dilkit.comm.passes.rows import collect_rows
from dilkit.comm.transports.base import Comm, Pending


class ReceivedRows(NamedTuple):
    """What a rank received to compute with."""

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


class SentRows:
    """Rows under way, with what goes with them. Making it sends them; then `wait()`, once."""

    def __init__(self, comm: Comm, tables: IndexTables, inputs: RankInputs, bias: RankBias | None) -> None:
        self.comm, self.tables = comm, tables
        sent, received = tables.sent["qkv"], tables.received["qkv"]
        rows = inputs.query.new_empty(sum(sent.counts), inputs.query.shape[-1])
        for role, x in zip("qkv", inputs[:3], strict=True):
            write_slices(rows, tables.packed[role], x)
        self.rows = comm.exchange(rows, sent.counts, received.counts, "queries, keys and values")
        mask, (batch, _, heads, _), kv_heads = inputs.mask, inputs.query.shape, inputs.key.shape[2]
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

    def wait(self) -> ReceivedRows:
        """What this rank received."""
        further = self.flags, self.query_positions, self.key_positions
        flags, of_queries, of_keys = (None if pending is None else pending.wait() for pending in further)
        return ReceivedRows(self.rows.wait(), None if flags is None else flags.view(-1), of_queries, of_keys)


def write_slices(message: Tensor, slices: list[MessageSlice], x: Tensor) -> None:
    """Write the rows of `x` to where messages have them."""
    for piece in slices:
        message[piece.span] = collect_rows(x, piece.rows)
