"""Spread segments: those whose rows several ranks hold, and who computes what of them. Counts only, no rows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dilkit.pattern import DilatedSegment, Pattern

Counts = NDArray[np.int64]


class ServedHead(NamedTuple):
    """A key/value head that a branch serves: its query heads are `first .. first + width - 1`, its rows start at `offset`."""

    kv_head: int
    first: int
    width: int
    offset: int


def served_heads(pattern: Pattern, branch: DilatedSegment, heads: int, kv_heads: int) -> tuple[ServedHead, ...]:
    """The key/value heads of a branch, ascending."""
    group = heads // kv_heads
    start, stop = branch.heads or (0, heads)
    return tuple(
        ServedHead(
            kv,
            max(start, kv * group),
            min(stop, (kv + 1) * group) - max(start, kv * group),
            pattern.head_offset(branch.dilation_rate, kv, kv_heads),
        )
        for kv in range(start // group, -(-stop // group))
    )


@dataclass(frozen=True, eq=False)
class Spread:
    """A segment `start .. stop - 1` of branch `branch`, held by `ranks` (ascending), cut into blocks of consecutive ranks.

    Block a is computed by the ranks `groups[a] .. groups[a + 1] - 1` (indices into `ranks`), which deal out its heads:
    `owners[a, h]` computes the queries of block a and head h. It needs their rows, and the keys and values of that head from
    block a and all others (if causal, from those before it).
    """

    branch: int
    start: int
    stop: int
    rate: int
    heads: tuple[ServedHead, ...]
    ranks: Counts
    kept: Counts
    """`(len(ranks) + 1, heads)`: how many rows each head keeps before the part of each rank; the last line, in all."""
    groups: Counts
    owners: Counts
    is_causal: bool

    @cached_property
    def rows(self) -> Counts:
        """`(len(ranks), heads)`: the rows that each rank holds."""
        return np.diff(self.kept, axis=0)

    @cached_property
    def widths(self) -> Counts:
        """`(heads,)`: query heads of each key/value head."""
        return np.array([head.width for head in self.heads], np.int64)

    @cached_property
    def group_of(self) -> Counts:
        """`(len(ranks),)`: the block of each rank."""
        return np.repeat(np.arange(len(self.groups) - 1), np.diff(self.groups))

    def blocks_needed(self, block: int) -> range:
        """The blocks whose keys the queries of `block` see."""
        return range(block + 1 if self.is_causal else len(self.owners))

    def queries_sent(self) -> Counts:
        """`(len(ranks),)`: rows of queries that each rank sends to others; as many results come back to it."""
        return (self.rows * self.widths * (self.owners[self.group_of] != self.ranks[:, None])).sum(1)

    def queries_received(self) -> Counts:
        """`(len(ranks),)`: rows of queries that each rank is sent."""
        whole = self._block_rows()[self.group_of]
        return ((whole - self.rows) * self.widths * self._owned).sum(1)

    def keys_sent(self) -> Counts:
        """`(len(ranks),)`: rows of keys that each rank sends; as many of values."""
        blocks = len(self.owners)
        times = blocks - self.group_of if self.is_causal else np.full(len(self.ranks), blocks)
        return (self.rows * (times[:, None] - self._owned)).sum(1)

    def keys_received(self) -> Counts:
        """`(len(ranks),)`: rows of keys that each rank is sent."""
        whole = self._block_rows()
        seen = np.cumsum(whole, axis=0) if self.is_causal else np.broadcast_to(whole.sum(0), whole.shape)
        return ((seen[self.group_of] - self.rows) * self._owned).sum(1)

    def pairs(self) -> Counts:
        """`(len(ranks),)`: query-key pairs that each rank computes."""
        first, last = self.kept[self.groups[:-1]], self.kept[self.groups[1:]]
        causal = (last * (last + 1) - first * (first + 1)) // 2
        pairs = causal if self.is_causal else (last - first) * self.kept[-1]
        return (pairs[self.group_of] * self.widths * self._owned).sum(1)

    @cached_property
    def _owned(self) -> NDArray[np.bool_]:
        """`(len(ranks), heads)`: whether a rank computes its block's queries of a head."""
        return self.owners[self.group_of] == self.ranks[:, None]

    def _block_rows(self) -> Counts:
        return np.diff(self.kept[self.groups], axis=0)


def spread_segments(
    pattern: Pattern, branch: int, cuts: Sequence[int], heads: int, kv_heads: int, is_causal: bool, group_size: int
) -> tuple[Spread, ...]:
    """The segments of a branch that are not within one rank, ascending. Rank t holds `cuts[t] .. cuts[t + 1] - 1`."""
    segment = pattern.branches[branch]
    seq = cuts[-1]
    length = max(min(segment.segment_length, seq), 1)
    served = served_heads(pattern, segment, heads, kv_heads)
    numbers = sorted({cut // length for cut in cuts[1:-1] if cut % length})
    found = []
    for start in (number * length for number in numbers):
        found.append(_spread(branch, start, min(start + length, seq), segment.dilation_rate, served, cuts, is_causal, group_size))
    return tuple(found)


def whole_segments(
    pattern: Pattern, branch: int, cuts: Sequence[int], rank: int, heads: int, kv_heads: int, is_causal: bool
) -> tuple[Spread, ...]:
    """The segments of a branch that are within rank `rank`, as spreads over that rank alone."""
    segment, seq = pattern.branches[branch], cuts[-1]
    length = max(min(segment.segment_length, seq), 1)
    served = served_heads(pattern, segment, heads, kv_heads)
    first, last = local_range(length, cuts[rank], cuts[rank + 1], seq)
    return tuple(
        _spread(branch, start, min(start + length, seq), segment.dilation_rate, served, cuts, is_causal, 1)
        for start in range(first, last, length)
    )


def local_range(length: int, start: int, stop: int, seq: int) -> tuple[int, int]:
    """The rows of `start .. stop - 1` whose segment of `length` tokens is whole there; `(start, start)` if there are none."""
    first, last = -(-start // length) * length, seq if stop == seq else stop // length * length
    return (first, last) if first < last else (start, start)


def _spread(
    branch: int,
    start: int,
    stop: int,
    rate: int,
    served: tuple[ServedHead, ...],
    cuts: Sequence[int],
    is_causal: bool,
    group_size: int,
) -> Spread:
    first, last = bisect_right(cuts, start) - 1, bisect_left(cuts, stop)
    bounds = np.clip(np.array(cuts[first : last + 1], np.int64), start, stop)
    offsets = np.array([head.offset for head in served], np.int64)
    # Never is a row past the end taken, so rates beyond the length say no more; and no sum overflows.
    step = min(rate, stop - start)
    kept = np.maximum(-((offsets + start - bounds[:, None]) // step), 0)
    ranks, sizes = np.arange(first, last), np.diff(bounds)
    groups = np.append(np.arange(0, len(ranks), group_size), len(ranks))
    owners = [deal_out(len(served), sizes[a:b]) + first + a for a, b in pairwise(groups)]
    return Spread(branch, start, stop, step, served, ranks, kept, groups, np.array(owners), is_causal)


def deal_out(heads: int, sizes: Counts) -> Counts:
    """`(heads,)`: who computes each head, an index into `sizes`, the rows that each holds: in proportion, in order.

    Shares are rounded by largest remainder, the first winning ties; a rank with no share computes none.
    """
    exact = sizes * heads
    total = max(int(sizes.sum()), 1)
    counts, rest = exact // total, exact % total
    for winner in np.argsort(-rest, kind="stable")[: heads - int(counts.sum())]:
        counts[winner] += 1
    return np.repeat(np.arange(len(sizes)), counts)
