"""Sliding windows over ranks: each rank is sent the halo of its shard, the rows of others within reach of its own.

    shard of rank t                 [a ................... b)
    halo        [a - reach ... a)                           [b ... b + reach)        the right one without causality alone

The halo lies in as many shards as the window reaches over. Each shard of it is a band: a triangle, and what lies beside it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dilkit.comm.plan.kept_rows import KeptRows, Message, ProblemRows, SmallProblem
from dilkit.comm.plan.kinds.exchange import BranchExchange, ExchangeCounts
from dilkit.comm.plan.kinds.excluded import ExcludedTokens
from dilkit.comm.plan.local_branches import LocalBranch
from dilkit.comm.plan.sharded_segments import IntArray
from dilkit.pattern.lowering import Band


@dataclass(frozen=True, eq=False)
class WindowExchange(BranchExchange):
    """The halo of a sliding window."""

    band: Band
    excluded: ExcludedTokens

    @property
    def kind(self) -> str:
        return "halo"

    @property
    def reach(self) -> int:
        """How far away the farthest key is that a query sees: less than the sequence is long."""
        return min(self.band.back, self.seq - 1) // self.band.rate * self.band.rate

    def local(self, rank: int) -> LocalBranch | None:
        start, stop = self.shard(rank)
        return LocalBranch(start, stop, self.branch) if start < stop else None

    def peers(self, rank: int) -> range:
        start, stop = self.shard(rank)
        first = bisect_right(self.cuts, max(start - self.reach, 0)) - 1
        last = bisect_left(self.cuts, min(stop + self.reach, self.seq))
        return range(max(first, self.held.start), min(last, self.held.stop))

    def message(self, source: int, target: int) -> Message:
        if source == target:
            ranges = self._seeing(source)
            return Message([self.kept(head, *rows) for head in self.heads for rows in ranges], [])
        start, stop = self._halo(source, target)
        return Message([], [self.kept(head, start, stop) for head in self.heads] if start < stop else [])

    def _halo(self, source: int, target: int) -> tuple[int, int]:
        """The rows of `source` within reach of those of `target`."""
        (first, last), (start, stop) = self.shard(source), self.shard(target)
        if source < target:
            return max(first, start - self.reach), last
        return first, first if self.is_causal else min(last, stop + self.reach)

    def _seeing(self, rank: int) -> list[tuple[int, int]]:
        """The rows of a rank that see rows of others, as one range or two."""
        start, stop = self.shard(rank)
        left = min(stop, start + self.reach) if start > 0 else start
        right = max(start, stop - self.reach) if stop < self.seq and not self.is_causal else stop
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
                    sides = self.kept(head, *queries), self.kept(head, start, stop)
                    excluded = self.excluded.queries(head, *queries), self.excluded.keys(head, start, stop)
                    for problem in self._of_residue((start + residue) % rate, *sides, source):
                        yield problem._replace(excluded_queries=excluded[0], excluded_keys=excluded[1])

    def _of_residue(self, residue: int, queries: KeptRows, keys: KeptRows, source: int) -> Iterator[SmallProblem]:
        """The problems of the rows `residue`, `residue + rate`, ... of both sides."""
        rate, after = self.band.rate, queries.start >= keys.stop
        ranges = [(-((residue - x) // rate) for x in (rows.start, rows.stop)) for rows in (queries, keys)]
        (v0, v1), (u0, u1) = ranges
        pieces = (pieces_after if after else pieces_before)((v0, v1), (u0, u1), self.reach // rate)
        for number, (of_queries, of_keys, triangle) in enumerate(pieces):
            step = -rate if after and triangle else rate
            of_query, of_key = (
                ProblemRows((kept,), residue - kept.start + rate * (first + (rows - 1) * (step < 0)), step, rows)
                for kept, (first, rows) in ((queries, of_queries), (keys, of_keys))
            )
            yield SmallProblem(of_query, of_key, triangle, None, 3 * source + number)

    @cached_property
    def counts(self) -> ExchangeCounts:
        edges, reach, both = self.edges, self.reach, not self.is_causal
        left, right = np.minimum(edges[:-1], reach), np.minimum(self.seq - edges[1:], reach) * both
        sent = _sent_to_the_right(edges, reach)
        if both:
            sent = sent + _sent_to_the_right((self.seq - edges)[::-1], reach)[::-1]
        rows = np.diff(edges)
        seeing = np.minimum(rows, reach * ((edges[:-1] > 0).astype(np.int64) + (edges[1:] < self.seq) * both))
        nothing, heads = self.by_rank(0 * rows), len(self.heads)
        received, sent, seeing = (self.by_rank(x) for x in (heads * (left + right), heads * sent, self.width * seeing))
        return ExchangeCounts(nothing, nothing, seeing, sent, received, received, self.by_rank(self._pairs()))

    def _pairs(self) -> NDArray[Any]:
        """Pairs of each rank that holds rows, with keys of others."""
        starts, stops = self.edges[:-1].astype(object), self.edges[1:].astype(object)
        pairs: NDArray[Any] = self._before(stops) - self._before(starts) - self._before(stops - starts)
        if not self.is_causal:
            pairs += self._before(self.seq - starts) - self._before(self.seq - stops) - self._before(stops - starts)
        total: NDArray[Any] = pairs * self.width
        return total

    def _before(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Pairs of the first `rows` rows of a sequence, as Python's integers, whose key comes before the query."""
        rate, steps = self.band.rate, self.reach // self.band.rate
        near = np.minimum(rows, rate * steps)
        full, rest = near // rate, near % rate
        pairs: NDArray[Any] = rate * full * (full - 1) // 2 + rest * full + np.maximum(rows - rate * steps, 0) * steps
        return pairs


def _sent_to_the_right(edges: IntArray, reach: int) -> IntArray:
    """Rows that each shard sends to those after it, each row to all shards that begin at most `reach` after it.

    A row at x goes to the shards that begin up to x + reach; the sum of `x + reach - begin` over them, from the begin of a
    shard to its end, counts its rows as often as they are sent.
    """
    begins = edges[:-1]
    before = np.append(0, np.cumsum(begins))

    def total(x: IntArray) -> IntArray:
        last = np.maximum(np.searchsorted(begins, x + reach, "left"), np.arange(1, len(edges)))
        first = np.arange(1, len(edges))
        sums: IntArray = (last - first) * (x + reach) - (before[last] - before[first])
        return sums

    return total(edges[1:]) - total(edges[:-1])


class Piece(NamedTuple):
    """`queries` and `keys` `(first, count)` that see each other; in a `triangle`, equally many: key i is seen by queries <= i."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    triangle: bool


def pieces_after(queries: tuple[int, int], keys: tuple[int, int], reach: int) -> Iterator[Piece]:
    """The pairs at most `reach` apart of queries and keys, each `(first, stop)`, where all queries come after all keys.

    >>> [tuple(piece) for piece in pieces_after((4, 8), (0, 4), 2)]  # query 4 sees keys 2 and 3, query 5 key 3
    [((4, 2), (2, 2), True)]
    >>> [tuple(piece) for piece in pieces_after((4, 8), (0, 4), 5)]
    [((4, 1), (0, 4), False), ((5, 3), (0, 3), True), ((5, 3), (3, 1), False)]
    """
    (v0, v1), (u0, u1) = queries, keys
    u0, v1 = max(u0, v0 - reach), min(v1, u1 + reach)
    if u0 >= u1 or v0 >= v1:
        return
    turn = max(v0, min(u0 + reach, v1))  # queries before it see all keys
    if v0 < turn:
        yield Piece((v0, turn - v0), (u0, u1 - u0), False)
    if turn < v1:
        yield Piece((turn, v1 - turn), (turn - reach, v1 - turn), True)
        if v1 - reach < u1:
            yield Piece((turn, v1 - turn), (v1 - reach, u1 - v1 + reach), False)


def pieces_before(queries: tuple[int, int], keys: tuple[int, int], reach: int) -> Iterator[Piece]:
    """The same where all queries come before all keys: in a triangle, key i is seen by queries >= i."""
    for (v, rows), (u, seen), triangle in pieces_after(_mirrored(queries), _mirrored(keys), reach):
        yield Piece((1 - v - rows, rows), (1 - u - seen, seen), triangle)


def _mirrored(rows: tuple[int, int]) -> tuple[int, int]:
    return 1 - rows[1], 1 - rows[0]
