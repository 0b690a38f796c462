"""Spread segments: those whose rows several ranks hold, and who computes what of them. Counts only, no rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
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
    def group_of(self) -> Counts:
        """`(len(ranks),)`: the block of each rank."""
        return np.repeat(np.arange(len(self.groups) - 1), np.diff(self.groups))

    def blocks_needed(self, block: int) -> range:
        """The blocks whose keys the queries of `block` see."""
        return range(block + 1 if self.is_causal else len(self.owners))


@dataclass(frozen=True, eq=False)
class Members:
    """All spread segments of a branch side by side: a line for each rank's part of each segment, in the order of the sequence."""

    segments: Counts
    """`(segments + 1,)`: where the lines of each segment begin."""
    bounds: Counts
    """`(segments, 2)`: the tokens `start .. stop - 1` of each segment."""
    rate: Counts
    """`(segments,)`: the rate, or the length of a segment that is shorter: of such a segment no second row is kept."""
    ranks: Counts
    """`(lines,)`"""
    sizes: Counts
    """`(lines,)`: tokens."""
    before: Counts
    """`(lines, heads)`: how many rows each head keeps of the segment before this part."""
    after: Counts
    """`(lines, heads)`: the same with this part."""
    heads: tuple[ServedHead, ...]

    @cached_property
    def segment(self) -> Counts:
        """`(lines,)`: the segment of each line, counted from 0."""
        return np.repeat(np.arange(len(self.segments) - 1), np.diff(self.segments))

    @cached_property
    def place(self) -> Counts:
        """`(lines,)`: which line of its segment each is, counted from 0."""
        return np.arange(len(self.ranks)) - self.segments[self.segment]

    @property
    def widest(self) -> int:
        """The most ranks that hold a segment; 1 if all segments are within ranks."""
        return int(np.diff(self.segments).max(initial=1))

    def blocks(self, group_size: int) -> Counts:
        """`(lines,)`: the block of each line, counted on over all segments, in blocks of `group_size` consecutive ranks."""
        return np.cumsum(self.place % group_size == 0) - 1

    def owners(self, group_size: int) -> Counts:
        """`(blocks, heads)`: who computes the queries of each block and head."""
        size = min(group_size, self.widest)
        block, place = self.blocks(group_size), self.place % group_size
        sizes = np.zeros((int(block[-1]) + 1, size) if len(block) else (0, size), np.int64)
        sizes[block, place] = self.sizes
        return deal_out(len(self.heads), sizes) + self.ranks[place == 0][:, None]


@lru_cache(maxsize=64)
def members_of(pattern: Pattern, branch: int, cuts: tuple[int, ...], heads: int, kv_heads: int) -> Members:
    """The segments of a branch that are not within one rank. Rank t holds `cuts[t] .. cuts[t + 1] - 1`."""
    segment, edges = pattern.branches[branch], np.array(cuts, np.int64)
    length = max(min(segment.segment_length, cuts[-1]), 1)
    inner = edges[1:-1]
    starts = np.unique(inner[inner % length != 0] // length) * length
    return _members(starts, length, segment.dilation_rate, served_heads(pattern, segment, heads, kv_heads), edges)


def _members(starts: Counts, length: int, rate: int, served: tuple[ServedHead, ...], edges: Counts) -> Members:
    stops = np.minimum(starts + length, edges[-1])
    first, last = np.searchsorted(edges, starts, "right") - 1, np.searchsorted(edges, stops, "left")
    segments = np.append(0, np.cumsum(last - first))
    of = np.repeat(np.arange(len(starts)), last - first)
    ranks = np.arange(segments[-1]) - segments[of] + first[of]
    # Never is a row past the end taken, so rates beyond the length say no more; and no sum overflows.
    steps = np.minimum(rate, stops - starts)
    offsets = np.array([head.offset for head in served], np.int64)
    low, high = np.maximum(edges[ranks], starts[of]), np.minimum(edges[ranks + 1], stops[of])
    before, after = (np.maximum(-((offsets + (starts[of] - x)[:, None]) // steps[of, None]), 0) for x in (low, high))
    return Members(segments, np.stack((starts, stops), 1), steps, ranks, high - low, before, after, served)


def spread_segments(members: Members, branch: int, group_size: int, is_causal: bool) -> tuple[Spread, ...]:
    """The segments one by one, ascending."""
    blocks, owners, found = members.blocks(group_size), members.owners(group_size), []
    for (start, stop), rate, (a, b) in zip(
        members.bounds.tolist(), members.rate.tolist(), pairwise(members.segments), strict=True
    ):
        kept = np.concatenate((members.before[a:b], members.after[b - 1 : b]))
        groups = np.append(np.arange(0, b - a, group_size), b - a)
        owned = owners[blocks[a] : blocks[b - 1] + 1]
        found.append(Spread(branch, start, stop, rate, members.heads, members.ranks[a:b], kept, groups, owned, is_causal))
    return tuple(found)


def whole_segments(
    pattern: Pattern, branch: int, cuts: Sequence[int], rank: int, heads: int, kv_heads: int, is_causal: bool
) -> tuple[Spread, ...]:
    """The segments of a branch that are within rank `rank`, as spreads over that rank alone."""
    segment, edges = pattern.branches[branch], np.array(cuts, np.int64)
    length = max(min(segment.segment_length, cuts[-1]), 1)
    starts = np.arange(*local_range(length, cuts[rank], cuts[rank + 1], cuts[-1]), length)
    served = served_heads(pattern, segment, heads, kv_heads)
    return spread_segments(_members(starts, length, segment.dilation_rate, served, edges), branch, 1, is_causal)


def local_range(length: int, start: int, stop: int, seq: int) -> tuple[int, int]:
    """The rows of `start .. stop - 1` whose segment of `length` tokens is whole there; `(start, start)` if there are none."""
    first, last = -(-start // length) * length, seq if stop == seq else stop // length * length
    return (first, last) if first < last else (start, start)


def deal_out(heads: int, sizes: Counts) -> Counts:
    """`(blocks, heads)`: who computes each head, an index into the line of `sizes` `(blocks, members)`: the rows of each member.

    Heads are dealt out in proportion, in order. Shares are rounded by largest remainder, the first winning ties; a member with
    no share, as one with no rows, computes none.
    """
    total = np.maximum(sizes.sum(1, keepdims=True), 1)
    counts, rest = sizes * heads // total, sizes * heads % total
    winners = np.argsort(-rest, axis=1, kind="stable")
    left = heads - counts.sum(1, keepdims=True)
    members = np.arange(sizes.shape[1])
    np.put_along_axis(counts, winners, np.take_along_axis(counts, winners, 1) + (members < left), 1)
    return np.repeat(np.tile(members, len(sizes)), counts.ravel()).reshape(len(sizes), heads)
