"""The forward pass by all-to-all: rows go to the ranks that compute with them, results come back and are merged."""

from __future__ import annotations

from torch import Tensor

from dilkit.comm.passes.all_to_all.index_tables import IndexTables
from dilkit.comm.passes.all_to_all.message_layout import ReturnTable
from dilkit.comm.passes.all_to_all.received_rows import ReceivedRows, SentRows
from dilkit.comm.passes.attention_op import AttentionOp
from dilkit.comm.passes.partial_results import PartialResults
from dilkit.comm.passes.rank_bias import RankBias
from dilkit.comm.passes.rank_inputs import RankInputs
from dilkit.comm.passes.rows import pack_columns, unpack_columns
from dilkit.comm.transports.base import Comm, Pending


class AllToAllForward:
    """A forward pass under way, in `rounds`. Making it sends the rows of the first; then `compute()`, then `merge_into(...)`."""

    def __init__(
        self, op: AttentionOp, comm: Comm, rounds: tuple[IndexTables, ...], inputs: RankInputs, bias: RankBias | None
    ) -> None:
        self.op, self.comm, self.rounds, self.inputs, self.bias = op, comm, rounds, inputs, bias
        self.under_way = [SentRows(comm, tables, inputs, bias) for tables in rounds[:1]]
        self.results: list[Pending] = []

    def compute(self) -> ReceivedRows | None:
        """Compute with what this rank received, and send the results. What it received last; None where nothing is sent."""
        held = None
        for tables in self.rounds:
            held = None  # before those of this round arrive
            held = self._received(tables)
            self.results.append(self._results(tables, held))
        return held

    def _received(self, tables: IndexTables) -> ReceivedRows:
        """The rows of a round."""
        sent = self.under_way.pop() if self.under_way else SentRows(self.comm, tables, self.inputs, self.bias)
        return sent.wait()

    def _results(self, tables: IndexTables, held: ReceivedRows) -> Pending:
        """Those of a round, on their way back."""
        sent, received, like = tables.sent["q"], tables.received["q"], self.inputs.query
        found = PartialResults.empty(sum(received.counts), like.shape[-1], like)
        for stack in tables.stacks:
            self.op.forward(found, stack, held.as_qkv(self.bias))
        results = pack_columns(found.out.to(like.dtype), found.lse[:, None])
        return self.comm.exchange(results, received.counts, sent.counts, "results")

    def merge_into(self, out: Tensor, lse: Tensor) -> None:
        """Merge the results into `out` `(batch, seq, heads, head_dim)` and `lse` `(batch, seq, heads)`, both contiguous."""
        if not self.rounds:
            return
        d, (rows, by_round) = out.shape[-1], ReturnTable.joined([tables.results for tables in self.rounds])
        columns, flat, flat_lse = ((d, out.dtype), (1, lse.dtype)), out.view(-1, d), lse.view(-1)
        merged = PartialResults(flat[rows], flat_lse[rows])
        for slices, results in zip(by_round, self.results, strict=True):
            returned, returned_lse = unpack_columns(results.wait(), *columns)
            for piece in slices:
                merged.merge(piece.rows, returned[piece.span], returned_lse[piece.span, 0])
        flat[rows], flat_lse[rows] = merged.out.to(out.dtype), merged.lse
