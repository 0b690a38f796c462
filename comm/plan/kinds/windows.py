"""Sliding windows over ranks: each rank is sent the halo of its shard, the rows of others within reach of its own.

    shard of rank t                 [a ................... b)
    halo         [a - back ... a)                           [b ... b + ahead)        the right one without causality alone

The halo lies in as many shards as the window reaches over. Each shard of it is a band: a triangle, and what lies beside it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilkit.comm.plan.exchange import BranchExchange, LocalBranch, Pairs
from dilkit.comm.plan.messages import HeadRows, Message, RowSpan, SmallProblem
from dilkit.comm.plan.shardable_forms import Forms, excluded_keys, excluded_queries
from dilkit.pattern.lowering import Band


@dataclass(frozen=True, eq=False)
class WindowExchange(BranchExchange):
    """The halo of a sliding window."""

    kind = "halo"
    band: Band
    excluding: Forms

    @property
    def back(self) -> int:
        """The distance of the farthest key behind a query that it sees: less than the sequence is long."""
        return min(self.band.back, self.seq - 1) // self.band.rate * self.band.rate

    @property
    def ahead(self) -> int:
        """The distance of the farthest key ahead of a query that it sees; 0 under causality."""
        return 0 if self.is_causal else min(self.band.ahead, self.seq - 1) // self.band.rate * self.band.rate

    def local(self, rank: int) -> LocalBranch | None:
        start, stop = self.shard(rank)
        return (start, stop, self.branch) if start < stop else None

    def peers(self, rank: int) -> range:
        start, stop = self.shard(rank)
        reach = max(self.back, self.ahead)
        first = bisect_right(self.cuts, max(start - reach, 0)) - 1
        last = bisect_left(self.cuts, min(stop + reach, self.seq))
        return range(max(first, self.held.start), min(last, self.held.stop))

    def message(self, source: int, target: int) -> Message:
        if source == target:
            return [(self.heads, start, 1, stop - start) for start, stop in self._seeing(source)], []
        start, stop = self._halo(source, target)
        return [], [(self.heads, start, 1, stop - start)] if start < stop else []

    def _halo(self, source: int, target: int) -> tuple[int, int]:
        """Return the rows of `source` within reach of those of `target`."""
        (first, last), (start, stop) = self.shard(source), self.shard(target)
        if source < target:
            return max(first, start - self.back), last
        return first, min(last, stop + self.ahead) if self.ahead else first

    def _seeing(self, rank: int) -> list[tuple[int, int]]:
        """Return the rows of a rank that see rows of others, as one range or two."""
        start, stop = self.shard(rank)
        left = min(stop, start + self.back) if start > 0 else start
        right = max(start, stop - self.ahead) if stop < self.seq else stop
        ranges = [(start, stop)] if right <= left else [(start, left), (right, stop)]
        return [rows for rows in ranges if rows[0] < rows[1]]

    def problems(self, rank: int) -> Iterator[SmallProblem]:
        ranges, rate = self._seeing(rank), self.band.rate
        for source in self.peers(rank):
            start, stop = self._halo(source, rank) if source != rank else (0, 0)
            if start >= stop:
                continue
            queries = ranges[0] if source < rank else ranges[-1]
            for residue in range(min(rate, stop - start)):
                for head in self.heads:
                    sides = self.rows_of(head, *queries), self.rows_of(head, start, stop)
                    excluded = excluded_queries(self.excluding, head, *queries), excluded_keys(self.excluding, head, start, stop)
                    for problem in self._of_residue((start + residue) % rate, *sides, source):
                        yield problem._replace(excluded_queries=excluded[0], excluded_keys=excluded[1])

    def _of_residue(self, residue: int, queries: HeadRows, keys: HeadRows, source: int) -> Iterator[SmallProblem]:
        rate, after = self.band.rate, queries.start >= keys.start + keys.size
        (v0, v1), (u0, u1) = (
            [-((residue - x) // rate) for x in (rows.start, rows.start + rows.size)] for rows in (queries, keys)
        )
        cut, reach = (pieces_after, self.back) if after else (pieces_before, self.ahead)
        for number, (query_piece, key_piece, triangle) in enumerate(cut((v0, v1), (u0, u1), reach // rate)):
            step = -rate if after and triangle else rate
            query_span, key_span = (
                RowSpan(rows, residue - rows.start + rate * (first + (count - 1) * (step < 0)), step, count)
                for rows, (first, count) in ((queries, query_piece), (keys, key_piece))
            )
            yield SmallProblem((query_span,), (key_span,), triangle, None, 3 * source + number)

    @cached_property
    def pairs(self) -> Pairs:
        starts, stops = self.edges[:-1].astype(object), self.edges[1:].astype(object)
        behind = [_behind(rows, self.back, self.band.rate) for rows in (stops, starts, stops - starts)]
        ahead = [_behind(rows, self.ahead, self.band.rate) for rows in (self.seq - starts, self.seq - stops, stops - starts)]
        total: Pairs = sum(whole - others - own for whole, others, own in (behind, ahead)) * self.width
        return total


def _behind(rows: NDArray[Any], reach: int, rate: int) -> NDArray[Any]:
    """Count pairs of the first `rows` rows of a sequence, as Python's integers, whose key is up to `reach` behind the query."""
    steps = reach // rate
    near = np.minimum(rows, rate * steps)
    full, rest = near // rate, near % rate
    pairs: NDArray[Any] = rate * full * (full - 1) // 2 + rest * full + np.maximum(rows - rate * steps, 0) * steps
    return pairs


Piece = tuple[tuple[int, int], tuple[int, int], bool]
"""Queries and keys `(first, count)` that see each other; True for a triangle, of equally many: queries <= i see key i."""


def pieces_after(queries: tuple[int, int], keys: tuple[int, int], reach: int) -> Iterator[Piece]:
    """Yield the pairs at most `reach` apart of queries and keys, each `(first, stop)`, where all queries come after all keys.

    >>> list(pieces_after((4, 8), (0, 4), 2))  # query 4 sees keys 2 and 3, query 5 key 3
    [((4, 2), (2, 2), True)]
    >>> list(pieces_after((4, 8), (0, 4), 5))
    [((4, 1), (0, 4), False), ((5, 3), (0, 3), True), ((5, 3), (3, 1), False)]
    """
    (v0, v1), (u0, u1) = queries, keys
    u0, v1 = max(u0, v0 - reach), min(v1, u1 + reach)
    if u0 >= u1 or v0 >= v1:
        return
    turn = max(v0, min(u0 + reach, v1))  # queries before it see all keys
    if v0 < turn:
        yield (v0, turn - v0), (u0, u1 - u0), False
    if turn < v1:
        yield (turn, v1 - turn), (turn - reach, v1 - turn), True
        if v1 - reach < u1:
            yield (turn, v1 - turn), (v1 - reach, u1 - v1 + reach), False


def pieces_before(queries: tuple[int, int], keys: tuple[int, int], reach: int) -> Iterator[Piece]:
    """Yield the same where all queries come before all keys: in a triangle, key i is seen by queries >= i."""
    for (v, rows), (u, seen), triangle in pieces_after(_mirrored(queries), _mirrored(keys), reach):
        yield (1 - v - rows, rows), (1 - u - seen, seen), triangle


def _mirrored(rows: tuple[int, int]) -> tuple[int, int]:
    return 1 - rows[1], 1 - rows[0]
