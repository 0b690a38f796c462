"""How many rows travel for the spread segments of a branch, and how much each rank computes: counts of all segments at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilkit.comm.plan.spread import Counts, Members

_MOST = 2**62
"""Beyond this, sums are taken of Python's integers: they do not overflow."""


@dataclass(frozen=True, eq=False)
class Tally:
    """The segments of a branch in blocks of `group_size` ranks. What is counted is `(world_size,)`, for a batch of 1."""

    members: Members
    world_size: int
    group_size: int
    is_causal: bool

    @cached_property
    def queries_sent(self) -> Counts:
        """Rows of queries that each rank sends to others; as many results come back to it."""
        return self._by_rank(self._rows * self._widths * ~self._owned)

    @cached_property
    def queries_received(self) -> Counts:
        """Rows of queries that each rank is sent."""
        return self.queries_computed - self._by_rank(self._rows * self._widths * self._owned)

    @cached_property
    def queries_computed(self) -> Counts:
        """Rows of queries that each rank computes, its own among them."""
        return self._by_rank((self._last - self._first) * self._widths * self._owned)

    @cached_property
    def keys_sent(self) -> Counts:
        """Rows of keys that each rank sends to others; as many of values."""
        ends = self._block[self.members.segments[1:] - 1] + 1
        starts = self._block if self.is_causal else self._block[self.members.segments[:-1]][self.members.segment]
        times = ends[self.members.segment] - starts
        return self._by_rank(self._rows * (times[:, None] - self._owned))

    @cached_property
    def keys_received(self) -> Counts:
        """Rows of keys that each rank is sent."""
        return self.keys_computed - self._by_rank(self._rows * self._owned)

    @cached_property
    def keys_computed(self) -> Counts:
        """Rows of keys that each rank computes with, its own among them."""
        return self._by_rank((self._last if self.is_causal else self._whole) * self._owned)

    @cached_property
    def ring_keys_sent(self) -> Counts:
        """Rows of keys that each rank sends on in all hops, where blocks of one rank go round.

        A block goes from each rank to the next; if causal, only on to the ranks after its own, else around to all others.
        """
        after, whole = self.members.after.sum(1), self._whole.sum(1)
        ends = self.members.segments[1:] - 1
        if self.is_causal:
            after[ends] = 0
            return self._by_rank(after)
        following = np.arange(1, len(after) + 1)
        following[ends] = self.members.segments[:-1]
        return self._by_rank(whole - self._rows.sum(1)[following])

    @cached_property
    def ring_keys_received(self) -> Counts:
        """Rows of keys of others that each rank gets to compute with; it sends home as many rows of their gradients."""
        return self._by_rank((self.members.before if self.is_causal else self._whole - self._rows).sum(1))

    @cached_property
    def ring_gradients_received(self) -> Counts:
        """Rows of gradients of keys that come home to each rank."""
        others = np.diff(self.members.segments)[self.members.segment] - 1
        return self._by_rank(self._rows.sum(1) * (others - self.members.place if self.is_causal else others))

    @cached_property
    def largest_block(self) -> Counts:
        """Rows of keys in the largest blocks of the segments that each rank is a member of, added up."""
        largest = np.maximum.reduceat(self._rows.sum(1), self.members.segments[:-1]) if len(self._block) else self._block
        return self._by_rank(largest[self.members.segment])

    @property
    def busiest(self) -> int:
        """Rows that the busiest rank sends, or is sent, in a forward pass; not round a ring."""
        both_ways = self.queries_sent + self.queries_received
        return int((both_ways + 2 * np.maximum(self.keys_sent, self.keys_received)).max())

    @cached_property
    def pairs(self) -> NDArray[Any]:
        """Query-key pairs that each rank computes, as integers of any size."""
        first, last, whole = self._first, self._last, self._whole
        if int(whole.max(initial=0)) ** 2 * int(self._widths.sum()) >= _MOST:
            first, last, whole = (x.astype(object) for x in (first, last, whole))
        pairs = (last * (last + 1) - first * (first + 1)) // 2 if self.is_causal else (last - first) * whole
        return self._by_rank(pairs * self._widths * self._owned, object)

    def _by_rank(self, lines: NDArray[Any], dtype: Any = np.int64) -> NDArray[Any]:
        total = np.zeros(self.world_size, dtype)
        np.add.at(total, self.members.ranks, lines if lines.ndim == 1 else lines.sum(1))
        return total

    @cached_property
    def _widths(self) -> Counts:
        """`(heads,)`: query heads of each key/value head."""
        return np.array([head.width for head in self.members.heads], np.int64)

    @cached_property
    def _rows(self) -> Counts:
        """`(lines, heads)`: the rows that each rank holds."""
        return self.members.after - self.members.before

    @cached_property
    def _block(self) -> Counts:
        return self.members.blocks(self.group_size)

    @cached_property
    def _owned(self) -> NDArray[np.bool_]:
        """`(lines, heads)`: whether a rank computes its block's queries of a head."""
        owned: NDArray[np.bool_] = self.members.owners(self.group_size)[self._block] == self.members.ranks[:, None]
        return owned

    @cached_property
    def _first(self) -> Counts:
        """`(lines, heads)`: rows of the segment before the block of a line."""
        return self.members.before[np.flatnonzero(np.diff(self._block, prepend=-1))][self._block]

    @cached_property
    def _last(self) -> Counts:
        """`(lines, heads)`: rows of the segment up to the end of the block of a line."""
        return self.members.after[np.flatnonzero(np.diff(self._block, append=len(self._block)))][self._block]

    @cached_property
    def _whole(self) -> Counts:
        """`(lines, heads)`: rows of the whole segment."""
        return self.members.after[self.members.segments[1:] - 1][self.members.segment]
