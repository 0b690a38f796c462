"""Segments over ranks: which rank computes which head of a segment that several hold, and which rows travel for that.

rank          0         1         2         3
segment   |---------|---------|---------|---------|      four lines of `SegmentShards`
groups    |----- group 0 -----|----- group 1 -----|      `group_size=2`
heads      0, 1      2, 3      0, 1      2, 3            `compute_ranks`: who computes the queries of its group

A rank sends its queries to the rank that computes them, and its keys to all ranks that see them. The residue classes of a stride
are segments as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from dilkit.comm.plan.exchange import BranchExchange, Counts, LocalBranch, Pairs, Route, Sent
from dilkit.comm.plan.messages import HeadRows, IntArray, Message, SharedRows, SmallProblem, whole
from dilkit.comm.plan.shardable_forms import ServedHead, served_heads, shardable_forms
from dilkit.pattern import Pattern
from dilkit.pattern.lowering import Band, Form, Segments

_MOST = 2**62
"""Beyond this, sums are taken of Python's integers: they do not overflow."""


@dataclass(frozen=True, eq=False)
class SegmentExchange(BranchExchange):
    """The messages of a branch with segments, or of a stride.

    `pattern_of(kv_head)` is the pattern that a head's rows follow within a segment, or None for nothing; without it they see each
    other. With `one_by_one` a rank also sends itself the rows of segments within its shard.
    """

    form: Form
    chosen: Route
    shards: SegmentShards
    pattern_of: Callable[[int], Pattern | None] | None
    one_by_one: bool

    @property
    def route(self) -> Route:
        return self.chosen

    @property
    def _length(self) -> int:
        """Tokens of a segment; at least 1, to divide by."""
        return segment_tokens(self.form, self.seq)

    def _local_rows(self, start: int, stop: int) -> tuple[int, int]:
        """Return the rows of `start .. stop - 1` whose segment lies within them; `(start, start)` if there are none."""
        length = self._length
        first, last = -(-start // length) * length, self.seq if stop == self.seq else stop // length * length
        return (first, last) if first < last else (start, start)

    def local(self, rank: int) -> LocalBranch | None:
        first, last = self._local_rows(*self.shard(rank))
        return (first, last, self.branch) if first < last else None

    def _own_shards(self, rank: int) -> list[SegmentShards]:
        """Return the segments whose rows a rank sends itself; those within its shard first."""
        if not self.one_by_one:
            return [self.shards]
        assert isinstance(self.form, Segments)
        starts = np.arange(*self._local_rows(*self.shard(rank)), self._length)
        return [shards_of_segments(starts, self._length, self.form.rate, self.heads, self.edges), self.shards]

    def peers(self, rank: int) -> list[int]:
        lines = [self.shards.lines_around(line) for line in self.shards.lines_of.get(rank, ())]
        return sorted({rank}.union(*(self.shards.ranks[around.start : around.stop].tolist() for around in lines)))

    def message(self, source: int, target: int) -> Message:
        queries: list[SharedRows] = []
        keys: list[SharedRows] = []
        for shards in self._own_shards(source) if source == target else [self.shards]:
            for line in shards.lines_of.get(source, ()):
                other = line + target - source  # the ranks of a segment follow each other
                if other not in shards.lines_around(line):
                    continue
                group, seeing = shards.group[[line, other]].tolist()
                for head in shards.heads_computed(other) if group <= seeing or not self.is_causal else ():
                    if rows := shards.rows_of(self.number, line, head):
                        shared = (rows.head,), rows.start, rows.step, rows.size
                        keys.append(shared)
                        if group == seeing:
                            queries.append(shared)
        return queries, keys

    def problems(self, rank: int) -> Iterator[SmallProblem]:
        for shards in self._own_shards(rank):
            for line in shards.lines_of.get(rank, ()):
                around = shards.lines_around(line)
                first, group, last = shards.group[[around.start, line, around.stop - 1]].tolist()
                for head in shards.heads_computed(line):
                    kv_head = shards.heads[head].kv_head
                    pattern = self.pattern_of(kv_head) if self.pattern_of else Pattern.dense()
                    for other in range(first, (group if self.is_causal else last) + 1) if pattern else ():
                        queries, keys = (shards.group_rows(self.number, one, head) for one in (group, other))
                        if queries and keys:
                            causal = self.is_causal and other == group
                            yield SmallProblem(whole(queries), whole(keys), causal, pattern, other - first)

    def messages(self) -> Iterator[Sent]:
        shards, widths = self.shards, [head.width for head in self.shards.heads]
        for first, last in pairwise(shards.segment_bounds.tolist()):
            rows, group, ranks = shards.rows[first:last].astype(float), shards.group[first:last], shards.ranks[first:last]
            computing = shards.compute_ranks[group[0] : group[-1] + 1] - ranks[0]
            computes = np.zeros((len(shards.heads), len(ranks)))
            computes[np.broadcast_to(np.arange(len(shards.heads)), computing.shape), computing] = 1.0
            queries = ((rows * widths) @ computes) * (group[:, None] == group)
            keys = (rows @ computes) * (group[:, None] <= group if self.is_causal else 1.0)
            yield ranks[:, None], ranks, queries, keys

    @cached_property
    def counts(self) -> Counts:
        queries, keys = segment_counts(self.shards, self.world_size, self.is_causal)
        if self.one_by_one:
            assert isinstance(self.form, Segments)
            local = [stop - start for start, stop in (self._local_rows(*shard) for shard in pairwise(self.cuts))]
            full, tail = np.divmod(np.array(local, np.int64), self._length)
            for head in self.heads:
                of_full, of_tail = (np.maximum(-((head.offset - n) // self.form.rate), 0) for n in (self._length, tail))
                queries[2] += head.width * (full * of_full + of_tail)
                keys[2] += full * of_full + of_tail
        return queries, keys

    @cached_property
    def pairs(self) -> Pairs:
        return segment_pairs(self.shards, self.world_size, self.is_causal)

    @cached_property
    def hops(self) -> int:
        """The hops of a block round a ring, in the segment that most ranks hold."""
        return self.shards.most_ranks - 1

    def ring_messages(self, hop: int) -> tuple[Sent, Sent]:
        """Return the messages of a ring at a hop: blocks to the next rank and, backward, gradients to the rank of a block."""
        shards, (place, size) = self.shards, self.shards.place_and_size
        onward, back = place + 1 < size if self.is_causal else hop + 1 < size, hop > 0
        computing = place >= hop if self.is_causal else hop < size
        first = np.arange(len(place)) - place
        owner = first + (place - hop) % size

        def sent(sends: NDArray[np.bool_], target: IntArray) -> Sent:
            lines = np.flatnonzero(sends)
            keys = shards.key_rows[owner[lines]]
            return shards.ranks[lines], shards.ranks[target[lines]], 0 * keys, keys

        return sent(computing & onward, first + (place + 1) % size), sent(computing & back, owner)

    @cached_property
    def ring_rows(self) -> tuple[IntArray, IntArray]:
        """`(2, world_size)` each: rows of keys that ranks send and receive round a ring, in blocks and as gradients."""
        blocks, gradients = np.zeros((2, 2, self.world_size), np.int64)
        for hop in range(self.hops + 1):
            for total, (source, target, _, keys) in zip((blocks, gradients), self.ring_messages(hop), strict=True):
                np.add.at(total[0], source, keys)
                np.add.at(total[1], target, keys)
        return blocks, gradients

    @cached_property
    def largest_block(self) -> IntArray:
        """`(world_size,)`: key rows in the largest block of each segment, added up over the segments that a rank holds."""
        shards, total = self.shards, np.zeros(self.world_size, np.int64)
        if len(shards.ranks):
            np.add.at(total, shards.ranks, np.maximum.reduceat(shards.key_rows, shards.segment_bounds[:-1])[shards.segment])
        return total


@dataclass(frozen=True, eq=False)
class SegmentShards:
    """Segments that ranks hold, side by side: one line for each rank's shard of each segment, in sequence order.

    The ranks of a segment are cut into groups of `group_size` neighbours, which divide the heads among them. A rank that computes
    a head needs the query rows of its group, and the key and value rows of all groups, with causality of those up to its own.
    """

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
    group_size: int = 1

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in vars(self).values() if isinstance(x, np.ndarray))

    @property
    def rows(self) -> IntArray:
        """`(lines, heads)`: rows of each shard."""
        return self.rows_through - self.rows_before

    @cached_property
    def key_rows(self) -> IntArray:
        """`(lines,)`: rows of keys of each shard, over all heads."""
        total: IntArray = self.rows.sum(1)
        return total

    @cached_property
    def segment(self) -> IntArray:
        """`(lines,)`: the segment of each shard, counted from 0."""
        return np.repeat(np.arange(len(self.segment_bounds) - 1), np.diff(self.segment_bounds))

    @cached_property
    def place_and_size(self) -> tuple[IntArray, IntArray]:
        """`(lines,)` each: the place of each shard within its segment, counted from 0, and how many shards that has."""
        return np.arange(len(self.ranks)) - self.segment_bounds[self.segment], np.diff(self.segment_bounds)[self.segment]

    @property
    def most_ranks(self) -> int:
        """The most ranks that hold one segment; 1 if every segment is within one rank."""
        return int(np.diff(self.segment_bounds).max(initial=1))

    @cached_property
    def group(self) -> IntArray:
        """`(lines,)`: the group of each shard, counted on from segment to segment."""
        return np.cumsum(self.place_and_size[0] % self.group_size == 0) - 1

    @cached_property
    def compute_ranks(self) -> IntArray:
        """`(groups, heads)`: the rank that computes the queries of each group and head."""
        size, group = min(self.group_size, self.most_ranks), self.group
        place = self.place_and_size[0] % self.group_size
        tokens = np.zeros((int(group[-1]) + 1, size) if len(group) else (0, size), np.int64)
        tokens[group, place] = self.tokens
        first_ranks = self.ranks[place == 0]
        computing: IntArray = assign_heads(len(self.heads), tokens) + first_ranks[:, None]
        return computing

    @property
    def computed_here(self) -> NDArray[np.bool_]:
        """`(lines, heads)`: True if the rank of a shard computes its group's queries of a head."""
        here: NDArray[np.bool_] = self.compute_ranks[self.group] == self.ranks[:, None]
        return here

    @property
    def rows_by_group(self) -> tuple[IntArray, IntArray, IntArray]:
        """Count the rows of each segment before a shard's group, up to its end, and in all: `(lines, heads)` each."""
        first, last = (np.flatnonzero(np.diff(self.group, **end)) for end in (dict(prepend=-1), dict(append=len(self.group))))
        every = self.rows_through[self.segment_bounds[1:] - 1][self.segment]
        return self.rows_before[first][self.group], self.rows_through[last][self.group], every

    @cached_property
    def lines_of(self) -> dict[int, list[int]]:
        """The lines of each rank that has some."""
        lines: dict[int, list[int]] = defaultdict(list)
        for line, rank in enumerate(self.ranks.tolist()):
            lines[rank].append(line)
        return dict(lines)

    def lines_around(self, line: int) -> range:
        segment = int(self.segment[line])
        return range(*self.segment_bounds[segment : segment + 2].tolist())

    def heads_computed(self, line: int) -> list[int]:
        heads: list[int] = np.flatnonzero(self.compute_ranks[self.group[line]] == self.ranks[line]).tolist()
        return heads

    def rows_of(self, branch: int, line: int, head: int) -> HeadRows | None:
        """Return the rows of a head in a shard; None if there are none."""
        first, last = int(self.rows_before[line, head]), int(self.rows_through[line, head])
        if first == last:
            return None
        segment, served = int(self.segment[line]), self.heads[head]
        rate = int(self.rate[segment])
        return HeadRows(branch, served, int(self.token_bounds[segment, 0]) + served.offset + first * rate, rate, last - first)

    def group_rows(self, branch: int, group: int, head: int) -> list[HeadRows]:
        """Return the rows of a head that the ranks of a group hold, one item a rank."""
        lines = range(*np.searchsorted(self.group, (group, group + 1)).tolist())
        return [rows for line in lines if (rows := self.rows_of(branch, line, head))]


def segment_shards(pattern: Pattern, branch: int, cuts: tuple[int, ...], heads: int, kv_heads: int) -> SegmentShards:
    """Return the segments of a branch that cross ranks; for a strided branch, its residue classes."""
    edges, seq = np.array(cuts, np.int64), cuts[-1]
    forms, inner = shardable_forms(pattern, seq, heads, kv_heads)[branch], edges[1:-1]
    served, form = served_heads(forms, heads, kv_heads), forms[0]
    length = segment_tokens(form, seq)
    if isinstance(form, Band):
        several = bool(((inner > 0) & (inner < seq)).any())
        return shards_of_segments(np.arange(min(form.rate, seq) * several), length, form.rate, served, edges)
    assert isinstance(form, Segments)
    starts = np.unique(inner[(inner % length != 0) & (inner < seq)] // length) * length
    return shards_of_segments(starts, length, form.rate, served, edges)


def segment_tokens(form: Form, seq: int) -> int:
    """Return the tokens of a segment, or of a stride, in a sequence of `seq`; at least 1, to divide by."""
    return max(min(form.length, seq) if isinstance(form, Segments) else seq, 1)


def shards_of_segments(
    starts: IntArray, length: int, rate: int, served: tuple[ServedHead, ...], edges: IntArray
) -> SegmentShards:
    """Return the shards of the segments of `length` tokens that begin at `starts`; `edges` are the cuts between ranks."""
    stops = np.minimum(starts + length, edges[-1])
    first, last = np.searchsorted(edges, starts, "right") - 1, np.searchsorted(edges, stops, "left")
    bounds = np.append(0, np.cumsum(last - first))
    segment = np.repeat(np.arange(len(starts)), last - first)
    ranks = np.arange(bounds[-1]) - bounds[segment] + first[segment]
    # A row past the end is never kept, so a rate beyond the segment's length says no more than the length; no sum overflows.
    steps = np.minimum(rate, stops - starts)
    offsets = np.array([head.offset for head in served], np.int64)
    low, high = np.maximum(edges[ranks], starts[segment]), np.minimum(edges[ranks + 1], stops[segment])
    before, through = (np.maximum(-((offsets + (starts[segment] - x)[:, None]) // steps[segment, None]), 0) for x in (low, high))
    return SegmentShards(bounds, np.stack((starts, stops), 1), steps, ranks, high - low, before, through, served)


def assign_heads(heads: int, tokens: IntArray) -> IntArray:
    """Return who computes each head, `(groups, heads)`, as places in the lines of `tokens` `(groups, ranks)`.

    Each rank gets consecutive heads in proportion to its tokens, rounded by largest remainder, the first rank winning ties.
    """
    total = np.maximum(tokens.sum(1, keepdims=True), 1)
    counts, rest = tokens * heads // total, tokens * heads % total
    winners = np.argsort(-rest, axis=1, kind="stable")
    left = heads - counts.sum(1, keepdims=True)
    ranks = np.arange(tokens.shape[1])
    np.put_along_axis(counts, winners, np.take_along_axis(counts, winners, 1) + (ranks < left), 1)
    return np.repeat(np.tile(ranks, len(tokens)), counts.ravel()).reshape(len(tokens), heads)


def segment_counts(shards: SegmentShards, world_size: int, is_causal: bool) -> Counts:
    """Count the rows of all messages of a branch, as `BranchExchange.counts` does, shard by shard rather than pair by pair."""
    widths = np.array([head.width for head in shards.heads], np.int64)
    here, rows, (first, last, every), (place, size) = (
        shards.computed_here, shards.rows, shards.rows_by_group, shards.place_and_size,
    )  # fmt: skip
    groups = -(-size // shards.group_size)
    times = (groups - place // shards.group_size if is_causal else groups)[:, None]  # groups that see the keys of a shard

    def by_rank(sent: IntArray, computed: IntArray, own: IntArray) -> IntArray:
        total = np.zeros((3, world_size), np.int64)
        for one, lines in zip(total, (sent, computed - own, computed), strict=True):
            np.add.at(one, shards.ranks, lines.sum(1))
        return total

    queries = by_rank(rows * widths * ~here, (last - first) * widths * here, rows * widths * here)
    return queries, by_rank(rows * (times - here), (last if is_causal else every) * here, rows * here)


def segment_pairs(shards: SegmentShards, world_size: int, is_causal: bool) -> Pairs:
    """Count the pairs that each rank computes in segments that several ranks hold."""
    widths, (first, last, every) = np.array([head.width for head in shards.heads], np.int64), shards.rows_by_group
    if int(every.max(initial=0)) ** 2 * int(widths.sum()) >= _MOST:
        first, last, every = (x.astype(object) for x in (first, last, every))
    pairs = (last * (last + 1) - first * (first + 1)) // 2 if is_causal else (last - first) * every
    total = np.zeros(world_size, object)
    np.add.at(total, shards.ranks, (pairs * widths * shards.computed_here).sum(1))
    return total


CHOOSING = ("auto", "balanced")


def choose_route(schedule: str, shards: SegmentShards, world_size: int, is_causal: bool, scatter_only: bool) -> Route:
    """Return the route of a branch: the busiest rank moves fewest rows by "auto", and computes least by "balanced"."""
    most_ranks = shards.most_ranks
    if most_ranks == 1:
        return Route("local", 1)
    if schedule in CHOOSING:
        busiest = busiest_ranks(shards, world_size, is_causal, scatter_only)
        most_pairs = dict.fromkeys(busiest, 0)
        if schedule == "balanced":
            grouped = {size: replace(shards, group_size=size) for size in busiest}
            most_pairs = {size: int(segment_pairs(one, world_size, is_causal).max()) for size, one in grouped.items()}
        size = min(busiest, key=lambda size: (most_pairs[size], busiest[size]))
        return Route({1: "gather", most_ranks: "scatter"}.get(size, "hybrid"), size)
    return Route(schedule, most_ranks if schedule == "scatter" else 1)


def busiest_ranks(shards: SegmentShards, world_size: int, is_causal: bool, scatter_only: bool) -> Mapping[int, int]:
    """Return the rows of the busiest rank by group size, for the sizes that "auto" considers; empty for a local branch.

    Those are the divisors of the most ranks that hold one segment, and powers of two; with `scatter_only`, the largest alone.
    """
    most_ranks = shards.most_ranks
    sizes = [size for size in range(most_ranks, 0, -1) if most_ranks % size == 0 or size.bit_count() == 1]
    busiest = {}
    for size in (sizes[:1] if scatter_only else sizes) if most_ranks > 1 else ():
        queries, keys = segment_counts(replace(shards, group_size=size), world_size, is_causal)
        busiest[size] = int((queries[:2].sum(0) + 2 * keys[:2].max(0)).max())
    return MappingProxyType(busiest)
