"""From which rank to which rank rows travel: `RingRows` round a ring, hop by hop, and `PairRows` of all other branches.

A segment of g ranks, `rows[i, h]` of them kept by rank i for head h; `computes[h, j]`: rank j computes head h of its own group

    queries  i -> j   sum over h of rows[i, h] * width[h] * computes[h, j]     within a group
    keys     i -> j   sum over h of rows[i, h] * computes[h, j]                to all groups, with causality those from its own on
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.plan.kinds.exchange import BranchExchange, ExchangeCounts
from dilkit.comm.plan.row_counts import RowCounts
from dilkit.comm.plan.sharded_segments import IntArray, ShardedSegment
from dilkit.comm.plan.traffic import Rows

Table = NDArray[np.float64]
"""`(world_size, world_size)`, from a rank (line) to a rank (column); nothing to itself."""
MOST_PAIRS = 2**15
"""Pairs of ranks of a branch without segments whose messages are looked at one by one."""
MOST_ENTRIES = 2**27
"""Entries of the tables of all segments of a branch that are added up one by one."""


@dataclass(frozen=True)
class PairRows:
    """Rows of queries and of keys (and values) that ranks send each other in a forward pass, for a batch of 1.

    Where a branch has more pairs of ranks, or segments, than are looked at one by one, what a rank sends goes to the others in
    proportion to what they receive.
    """

    queries: Table
    keys: Table

    def legs(self, backward: bool, rows: Rows) -> tuple[Table, Table]:
        """Bytes of the rows there, and of what is computed with them back, as `branch_traffic` has them."""
        row, lse = rows.row_bytes, rows.lse_bytes
        if backward:
            there = self.queries * (2 * row + lse)
            back = self.queries.T * rows.dquery_bytes + self.keys.T * rows.dkey_value_bytes
        else:
            there = self.queries * rows.query_bytes + self.keys * rows.key_value_bytes
            back = self.queries.T * (row + lse)
        return there * rows.batch, back * rows.batch


class Messages(NamedTuple):
    """`(messages,)`: the rank that sends each, the rank that it is for, and its bytes."""

    source: IntArray
    target: IntArray
    volume: NDArray[np.float64]


@dataclass(frozen=True)
class RingRows:
    """Rows of keys that go round the segments of a branch, a line for each rank of each segment.

    `rank`, `place`, `first`, `size`: the rank, its place in the segment, the segment's first line, and its number of lines.
    """

    rank: IntArray
    place: IntArray
    first: IntArray
    size: IntArray
    rows: IntArray
    is_causal: bool

    @classmethod
    def of_branch(cls, plan: ExchangePlan, branch: int) -> RingRows:
        """Return the rows of a branch with a ring schedule."""
        segments = plan.sharded_segments[branch]
        sizes = np.array([len(one.ranks) for one in segments])
        size, first = np.repeat(sizes, sizes), np.repeat(np.cumsum(sizes) - sizes, sizes)
        rank, rows = (np.concatenate(x) for x in zip(*((one.ranks, np.diff(one.kept.sum(1))) for one in segments), strict=True))
        return cls(rank, np.arange(len(rank)) - first, first, size, rows, segments[0].is_causal)

    @property
    def hops(self) -> int:
        """Hops of a block, in the segment that most ranks hold."""
        return int(self.size.max()) - 1

    def legs(self, hop: int, backward: bool, rows: Rows) -> list[Messages]:
        """Bytes that ranks send each other at a hop: blocks to the next rank and, backward, gradients to the rank of a block."""
        legs = []
        if hop < self.hops:
            sends = (self.place >= hop) & (self.place + 1 < self.size) if self.is_causal else hop + 1 < self.size
            legs.append(self._messages(sends, 1, hop, rows.key_value_bytes * rows.batch))
        if backward and hop:
            sends = self.place >= hop if self.is_causal else hop < self.size
            legs.append(self._messages(sends, -hop, hop, rows.dkey_value_bytes * rows.batch))
        return legs

    def _messages(self, sends: NDArray[np.bool_], distance: int, hop: int, row: int) -> Messages:
        """The block of the rank `hop` before, or its gradients, `row` bytes a row, to the rank `distance` after."""
        target, owner = (self.first + (self.place + by) % self.size for by in (distance, -hop))
        return Messages(self.rank[sends], self.rank[target[sends]], row * self.rows[owner[sends]].astype(float))


def pair_rows(plan: ExchangePlan) -> PairRows:
    """Those of all branches."""
    found = PairRows(*np.zeros((2, plan.world_size, plan.world_size)))
    for branch, (route, exchange, counts) in enumerate(zip(plan.routes, plan.exchanges, plan.row_counts, strict=True)):
        if route.kind in ("local", "ring"):
            continue
        if exchange is not None:
            _add_exchange(found, exchange, plan.world_size)
        elif (segments := plan.sharded_segments[branch]) and sum(len(one.ranks) ** 2 for one in segments) <= MOST_ENTRIES:
            for segment in segments:
                _add_segment(found, segment)
        else:
            _add_in_proportion(found, counts)
    return found


def _add_segment(found: PairRows, segment: ShardedSegment) -> None:
    rows, groups = np.diff(segment.kept, axis=0).astype(float), segment.group_of
    computes = np.zeros((len(segment.heads), len(segment.ranks)))
    heads = np.broadcast_to(np.arange(len(segment.heads)), segment.compute_ranks.shape)
    computes[heads, segment.compute_ranks - segment.ranks[0]] = 1.0
    widths = np.array([head.width for head in segment.heads], float)
    part = slice(int(segment.ranks[0]), int(segment.ranks[-1]) + 1)
    queries, keys = ((rows * widths) @ computes) * (groups[:, None] == groups), rows @ computes
    for table, sent in (
        (found.queries, queries),
        (found.keys, keys * (groups[:, None] <= groups) if segment.is_causal else keys),
    ):
        np.fill_diagonal(sent, 0.0)
        table[part, part] += sent


def _add_exchange(found: PairRows, exchange: BranchExchange, world_size: int) -> None:
    pairs = [(source, target) for source in exchange.held for target in exchange.peers(source) if source != target]
    if len(pairs) > MOST_PAIRS:
        _add_in_proportion(found, exchange.counts)
        return
    for source, target in pairs:
        queries, keys = exchange.message(source, target).rows()
        found.queries[source, target] += queries
        found.keys[source, target] += keys


def _add_in_proportion(found: PairRows, counts: RowCounts | ExchangeCounts) -> None:
    both = (found.queries, counts.queries_sent, counts.queries_received), (found.keys, counts.keys_sent, counts.keys_received)
    for table, sent, received in both:
        shares = np.tile(received.astype(float), (len(sent), 1))
        np.fill_diagonal(shares, 0.0)
        table += sent[:, None] * shares / np.maximum(shares.sum(1, keepdims=True), 1.0)
