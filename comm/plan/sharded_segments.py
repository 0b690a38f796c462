"""The segments whose rows several ranks hold, and which rank computes which head of them: counts, no rows.

rank          0         1         2         3
segment   |---------|---------|---------|---------|      one `ShardedSegment`, four ranks
groups    |----- group 0 -----|----- group 1 -----|      `group_size=2`
heads      0, 1      2, 3      0, 1      2, 3            `compute_ranks`: who computes the queries of its group
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dilkit import plan as core_plan
from dilkit.comm.plan.divided import DividedForms, divided
from dilkit.pattern import Pattern
from dilkit.pattern.lowering import Band, Segments

IntArray = NDArray[np.int64]


class ServedHead(NamedTuple):
    """A key/value head that a branch serves: its query heads are `first .. first + width - 1`, its rows start at `offset`."""

    kv_head: int
    first: int
    width: int
    offset: int


def served_heads(forms: DividedForms, heads: int, kv_heads: int) -> tuple[ServedHead, ...]:
    """The key/value heads that a branch serves, ascending; only segments leave out rows before an offset."""
    group, start, stop = heads // kv_heads, forms[0].heads[0], forms[-1].heads[1]
    offsets = forms[0].offsets if isinstance(forms[0], Segments) else (0,) * (stop - start)
    served = ((kv, max(start, kv * group), min(stop, (kv + 1) * group)) for kv in range(start // group, -(-stop // group)))
    return tuple(ServedHead(kv, first, last - first, offsets[first - start]) for kv, first, last in served)


@dataclass(frozen=True, eq=False)
class ShardedSegment:
    """The segment `start .. stop - 1` of branch `branch`, held by `ranks` (ascending), which are cut into groups of neighbours.

    Group g consists of the ranks `ranks[group_bounds[g] : group_bounds[g + 1]]`, which divide the heads among them: rank
    `compute_ranks[g, h]` computes the queries of group g and head h. It needs the query rows of its group, and the key and value
    rows of that head from all groups (with causality, from its own group and those before it).
    """

    branch: int
    start: int
    stop: int
    rate: int
    heads: tuple[ServedHead, ...]
    ranks: IntArray
    kept: IntArray
    """`(len(ranks) + 1, heads)`: how many rows each head keeps before the shard of each rank; the last line: in all."""
    group_bounds: IntArray
    compute_ranks: IntArray
    is_causal: bool

    @cached_property
    def group_of(self) -> IntArray:
        """`(len(ranks),)`: the group of each rank."""
        return np.repeat(np.arange(len(self.group_bounds) - 1), np.diff(self.group_bounds))

    def holds(self, rank: int) -> bool:
        """Whether a rank holds rows of this segment."""
        return bool(self.ranks[0] <= rank <= self.ranks[-1])

    def index_of(self, rank: int) -> int:
        """The place of a rank among `ranks`."""
        return rank - int(self.ranks[0])

    def key_groups(self, group: int) -> range:
        """The groups whose keys the queries of `group` see."""
        return range(group + 1 if self.is_causal else len(self.compute_ranks))


@dataclass(frozen=True, eq=False)
class SegmentShards:
    """All sharded segments of a branch side by side: one line for each rank's shard of each segment, in sequence order."""

    segment_bounds: IntArray
    """`(segments + 1,)`: where the lines of each segment begin."""
    token_bounds: IntArray
    """`(segments, 2)`: the tokens `start .. stop - 1` of each segment."""
    rate: IntArray
    """`(segments,)`: the dilation rate, or the length of a segment that is shorter: such a segment keeps one row at most."""
    ranks: IntArray
    """`(lines,)`: the rank that holds each shard."""
    tokens: IntArray
    """`(lines,)`: tokens of each shard."""
    rows_before: IntArray
    """`(lines, heads)`: how many rows each head keeps of the segment before this shard."""
    rows_through: IntArray
    """`(lines, heads)`: the same with this shard."""
    heads: tuple[ServedHead, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that it is made of."""
        return sum(x.nbytes for x in vars(self).values() if isinstance(x, np.ndarray))

    @cached_property
    def segment(self) -> IntArray:
        """`(lines,)`: the segment of each shard, counted from 0."""
        return np.repeat(np.arange(len(self.segment_bounds) - 1), np.diff(self.segment_bounds))

    @cached_property
    def place(self) -> IntArray:
        """`(lines,)`: the place of each shard within its segment, counted from 0."""
        places: IntArray = np.arange(len(self.ranks)) - self.segment_bounds[self.segment]
        return places

    @property
    def most_ranks(self) -> int:
        """The most ranks that hold one segment; 1 if every segment is within one rank."""
        return int(np.diff(self.segment_bounds).max(initial=1))

    def groups(self, group_size: int) -> IntArray:
        """`(lines,)`: the group of each shard, in groups of `group_size` ranks, counted on from segment to segment."""
        return np.cumsum(self.place % group_size == 0) - 1

    def compute_ranks(self, group_size: int) -> IntArray:
        """`(groups, heads)`: the rank that computes the queries of each group and head."""
        size = min(group_size, self.most_ranks)
        group, place = self.groups(group_size), self.place % group_size
        tokens = np.zeros((int(group[-1]) + 1, size) if len(group) else (0, size), np.int64)
        tokens[group, place] = self.tokens
        first_ranks = self.ranks[place == 0]
        computing: IntArray = assign_heads(len(self.heads), tokens) + first_ranks[:, None]
        return computing

    def split(self, branch: int, group_size: int, is_causal: bool) -> tuple[ShardedSegment, ...]:
        """The segments one by one, ascending."""
        groups, compute_ranks, found = self.groups(group_size), self.compute_ranks(group_size), []
        for (start, stop), rate, (a, b) in zip(
            self.token_bounds.tolist(), self.rate.tolist(), pairwise(self.segment_bounds), strict=True
        ):
            kept = np.concatenate((self.rows_before[a:b], self.rows_through[b - 1 : b]))
            bounds = np.append(np.arange(0, b - a, group_size), b - a)
            computing = compute_ranks[groups[a] : groups[b - 1] + 1]
            facts = (branch, start, stop, rate, self.heads, self.ranks[a:b], kept, bounds, computing, is_causal)
            found.append(ShardedSegment(*facts))
        return tuple(found)


def segment_shards(pattern: Pattern, branch: int, cuts: tuple[int, ...], heads: int, kv_heads: int) -> SegmentShards:
    """The segments of a branch that are not within one rank. Rank t holds the rows `cuts[t] .. cuts[t + 1] - 1`.

    The residue classes of a stride are segments as well: each from its first token to the end of the sequence.
    """
    facts = pattern, branch, cuts, heads, kv_heads
    shards: SegmentShards = core_plan.cached(("segment shards", *facts), _segment_shards, *facts)
    return shards


def _segment_shards(pattern: Pattern, branch: int, cuts: tuple[int, ...], heads: int, kv_heads: int) -> SegmentShards:
    edges, seq = np.array(cuts, np.int64), cuts[-1]
    forms, inner = divided(pattern, seq, heads, kv_heads)[branch], edges[1:-1]
    served, form = served_heads(forms, heads, kv_heads), forms[0]
    if isinstance(form, Band):
        several = bool(((inner > 0) & (inner < seq)).any())
        return shards_of_segments(np.arange(min(form.rate, seq) * several), seq, form.rate, served, edges)
    assert isinstance(form, Segments)
    length = segment_tokens(form, seq)
    starts = np.unique(inner[(inner % length != 0) & (inner < seq)] // length) * length
    return shards_of_segments(starts, length, form.rate, served, edges)


def segment_tokens(form: Segments, seq: int) -> int:
    """The length of a segment in a sequence of `seq` tokens; at least 1, to divide by."""
    return max(min(form.length, seq), 1)


def shards_of_segments(
    starts: IntArray, length: int, rate: int, served: tuple[ServedHead, ...], edges: IntArray
) -> SegmentShards:
    """The shards of the segments of `length` tokens that begin at `starts`; `edges` are the cuts between ranks."""
    stops = np.minimum(starts + length, edges[-1])
    first, last = np.searchsorted(edges, starts, "right") - 1, np.searchsorted(edges, stops, "left")
    bounds = np.append(0, np.cumsum(last - first))
    of = np.repeat(np.arange(len(starts)), last - first)
    ranks = np.arange(bounds[-1]) - bounds[of] + first[of]
    # A row past the end is never kept, so a rate beyond the segment's length says no more than the length; no sum overflows.
    steps = np.minimum(rate, stops - starts)
    offsets = np.array([head.offset for head in served], np.int64)
    low, high = np.maximum(edges[ranks], starts[of]), np.minimum(edges[ranks + 1], stops[of])
    before, through = (np.maximum(-((offsets + (starts[of] - x)[:, None]) // steps[of, None]), 0) for x in (low, high))
    return SegmentShards(bounds, np.stack((starts, stops), 1), steps, ranks, high - low, before, through, served)


def assign_heads(heads: int, tokens: IntArray) -> IntArray:
    """`(groups, heads)`: who computes each head, an index into the line of `tokens` `(groups, ranks)`, the tokens of each rank.

    Each rank gets consecutive heads in proportion to its tokens. Shares are rounded by largest remainder, the first rank winning
    ties; a rank with no share, such as one with no tokens, computes none.
    """
    total = np.maximum(tokens.sum(1, keepdims=True), 1)
    counts, rest = tokens * heads // total, tokens * heads % total
    winners = np.argsort(-rest, axis=1, kind="stable")
    left = heads - counts.sum(1, keepdims=True)
    ranks = np.arange(tokens.shape[1])
    np.put_along_axis(counts, winners, np.take_along_axis(counts, winners, 1) + (ranks < left), 1)
    return np.repeat(np.tile(ranks, len(tokens)), counts.ravel()).reshape(len(tokens), heads)
