"""How many rows each rank sends, receives and computes with for the sharded segments of a branch, all segments at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilkit.comm.plan.sharded_segments import IntArray, SegmentShards

_MOST = 2**62
"""Beyond this, sums are taken of Python's integers: they do not overflow."""


@dataclass(frozen=True, eq=False)
class RowCounts:
    """Send and receive counts of a branch in groups of `group_size` ranks. Each is `(world_size,)`, for a batch of 1."""

    shards: SegmentShards
    world_size: int
    group_size: int
    is_causal: bool

    @cached_property
    def queries_sent(self) -> IntArray:
        """Query rows that each rank sends to others; as many rows of results come back to it."""
        return self._by_rank(self._rows * self._widths * ~self._computed_here)

    @cached_property
    def queries_received(self) -> IntArray:
        """Query rows that each rank receives from others."""
        return self.queries_computed - self._by_rank(self._rows * self._widths * self._computed_here)

    @cached_property
    def queries_computed(self) -> IntArray:
        """Query rows that each rank computes, its own among them."""
        return self._by_rank((self._last - self._first) * self._widths * self._computed_here)

    @cached_property
    def keys_sent(self) -> IntArray:
        """Key rows that each rank sends to others; as many value rows."""
        shards = self.shards
        ends = self._group[shards.segment_bounds[1:] - 1] + 1
        starts = self._group if self.is_causal else self._group[shards.segment_bounds[:-1]][shards.segment]
        times = ends[shards.segment] - starts
        return self._by_rank(self._rows * (times[:, None] - self._computed_here))

    @cached_property
    def keys_received(self) -> IntArray:
        """Key rows that each rank receives from others."""
        return self.keys_computed - self._by_rank(self._rows * self._computed_here)

    @cached_property
    def keys_computed(self) -> IntArray:
        """Key rows that each rank computes with, its own among them."""
        return self._by_rank((self._last if self.is_causal else self._whole) * self._computed_here)

    @cached_property
    def ring_keys_sent(self) -> IntArray:
        """Key rows that each rank sends on in all hops of a ring schedule.

        A block goes from each rank to the next: around to all others, or with causality only to the ranks after its own.
        """
        through, whole = self.shards.rows_through.sum(1), self._whole.sum(1)
        ends = self.shards.segment_bounds[1:] - 1
        if self.is_causal:
            through[ends] = 0
            return self._by_rank(through)
        following = np.arange(1, len(through) + 1)
        following[ends] = self.shards.segment_bounds[:-1]
        return self._by_rank(whole - self._rows.sum(1)[following])

    @cached_property
    def ring_keys_received(self) -> IntArray:
        """Key rows of others that each rank of a ring computes with; it returns as many rows of their gradients."""
        return self._by_rank((self.shards.rows_before if self.is_causal else self._whole - self._rows).sum(1))

    @cached_property
    def ring_gradients_received(self) -> IntArray:
        """Rows of key gradients that other ranks of a ring return to each rank."""
        others = np.diff(self.shards.segment_bounds)[self.shards.segment] - 1
        return self._by_rank(self._rows.sum(1) * (others - self.shards.place if self.is_causal else others))

    @cached_property
    def largest_block(self) -> IntArray:
        """Key rows in the largest key/value block of each segment, added up over the segments that a rank holds rows of."""
        shards = self.shards
        largest = np.maximum.reduceat(self._rows.sum(1), shards.segment_bounds[:-1]) if len(self._group) else self._group
        return self._by_rank(largest[shards.segment])

    @property
    def busiest(self) -> int:
        """Rows that the busiest rank sends, or receives, in a forward pass; not for a ring."""
        both_ways = self.queries_sent + self.queries_received
        return int((both_ways + 2 * np.maximum(self.keys_sent, self.keys_received)).max())

    @cached_property
    def pairs(self) -> NDArray[Any]:
        """Query-key pairs that each rank computes, as integers of any size."""
        first, last, whole = self._first, self._last, self._whole
        if int(whole.max(initial=0)) ** 2 * int(self._widths.sum()) >= _MOST:
            first, last, whole = (x.astype(object) for x in (first, last, whole))
        pairs = (last * (last + 1) - first * (first + 1)) // 2 if self.is_causal else (last - first) * whole
        total: NDArray[Any] = np.zeros(self.world_size, object)
        np.add.at(total, self.shards.ranks, (pairs * self._widths * self._computed_here).sum(1))
        return total

    def _by_rank(self, lines: NDArray[Any]) -> IntArray:
        """`(world_size,)`: `lines`, one for each shard, added up by the rank that holds the shard (and over heads)."""
        total = np.zeros(self.world_size, np.int64)
        np.add.at(total, self.shards.ranks, lines if lines.ndim == 1 else lines.sum(1))
        return total

    @cached_property
    def _widths(self) -> IntArray:
        """`(heads,)`: query heads of each key/value head."""
        return np.array([head.width for head in self.shards.heads], np.int64)

    @cached_property
    def _rows(self) -> IntArray:
        """`(lines, heads)`: rows of each shard."""
        return self.shards.rows_through - self.shards.rows_before

    @cached_property
    def _group(self) -> IntArray:
        return self.shards.groups(self.group_size)

    @cached_property
    def _computed_here(self) -> NDArray[np.bool_]:
        """`(lines, heads)`: whether the rank of a shard computes its group's queries of a head."""
        here: NDArray[np.bool_] = self.shards.compute_ranks(self.group_size)[self._group] == self.shards.ranks[:, None]
        return here

    @cached_property
    def _first(self) -> IntArray:
        """`(lines, heads)`: rows of the segment before the group of a shard."""
        return self.shards.rows_before[np.flatnonzero(np.diff(self._group, prepend=-1))][self._group]

    @cached_property
    def _last(self) -> IntArray:
        """`(lines, heads)`: rows of the segment up to the end of the group of a shard."""
        return self.shards.rows_through[np.flatnonzero(np.diff(self._group, append=len(self._group)))][self._group]

    @cached_property
    def _whole(self) -> IntArray:
        """`(lines, heads)`: rows of the whole segment."""
        return self.shards.rows_through[self.shards.segment_bounds[1:] - 1][self.shards.segment]
