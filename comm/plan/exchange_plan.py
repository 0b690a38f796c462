"""The exchange plan: who computes what, and what has to travel for that. A pure value; nothing is sent to make it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import lcm
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilkit.checks import boolean, integer, one_of
from dilkit.comm.plan.spread import Counts, Members, Spread, members_of, spread_segments
from dilkit.comm.plan.tally import Tally
from dilkit.comm.plan.traffic import Legs, Rows, legs_of
from dilkit.comm.plan.within import tokens_within
from dilkit.pattern import Pattern

SCHEDULES = ("auto", "scatter", "gather", "ring")
PHASES = ("forward", "backward")


@dataclass(frozen=True)
class Work:
    """Query-key pairs that each rank computes, `(world_size,)` each: in its own segments, with rows moved to it, round a ring."""

    local: NDArray[Any]
    moved: NDArray[Any]
    ring: NDArray[Any]

    @property
    def total(self) -> NDArray[Any]:
        return self.local + self.moved + self.ring


@dataclass(frozen=True)
class Route:
    """How a branch is computed over ranks.

    `kind`: "local" (all segments within ranks), "scatter" (the ranks of a segment deal out its heads), "gather" (each computes
    its own queries and is sent the others' keys and values), "hybrid" (both: heads are dealt out among `group_size` ranks, keys
    and values go to all such groups), "ring" (as gather, but keys and values go round, hop by hop, and never lie together).
    """

    kind: str
    group_size: int


@dataclass(frozen=True)
class ExchangePlan:
    """What ranks 0 .. world_size - 1 compute and send. Rank t holds the rows `cuts[t] .. cuts[t + 1] - 1` of the sequence.

    `schedule`: "auto" takes for each branch what moves the fewest rows through the busiest rank; the others are taken
    wherever a segment is not within one rank. `fuse_branches=False` computes branches and segments one by one, so that the
    result is bitwise the same for every world size: rows are moved, and never summed in another order. "auto" then scatters,
    and "gather" and "ring", which sum up what the ranks find, are refused.
    """

    pattern: Pattern
    cuts: tuple[int, ...]
    heads: int
    kv_heads: int
    is_causal: bool = False
    schedule: str = "auto"
    fuse_branches: bool = True

    def __post_init__(self) -> None:
        one_of("schedule", self.schedule, SCHEDULES)
        boolean("is_causal", self.is_causal)
        boolean("fuse_branches", self.fuse_branches)
        integer("heads", self.heads, at_least=1)
        if not isinstance(self.pattern, Pattern):
            raise TypeError(f"pattern={self.pattern!r} is a {type(self.pattern).__name__}; a dilkit.Pattern is needed")
        self.pattern.check_heads(self.heads, integer("kv_heads", self.kv_heads))
        for i, cut in enumerate(self.cuts):
            integer(f"cuts[{i}]", cut)
        if len(self.cuts) < 2 or self.cuts[0] != 0 or any(a >= b for a, b in pairwise(self.cuts)):
            raise ValueError(f"cuts={self.cuts} must start at 0 and grow: every rank holds at least one row")
        if not self.fuse_branches and self.schedule in ("gather", "ring"):
            raise ValueError(
                f"schedule={self.schedule!r} sums up what each rank finds, so that bits depend on the world size, which "
                "fuse_branches=False rules out; use schedule='scatter' or 'auto'"
            )
        if self.is_joint and self.schedule in ("gather", "ring"):
            raise ValueError(
                f"schedule={self.schedule!r} sums up what each branch finds, but with overlap='once' a key counts once over all "
                "branches; use schedule='scatter' or 'auto'"
            )

    @cached_property
    def is_joint(self) -> bool:
        """Whether a key counts once over all branches, so that a row's whole softmax must be computed in one piece."""
        return self.pattern.overlap == "once" and len(self.pattern.branches) > 1

    @cached_property
    def moved(self) -> Pattern:
        """What is moved as if it were the pattern: for joint branches all rows, in segments that no branch's segment crosses."""
        if not self.is_joint:
            return self.pattern
        length = lcm(*(min(branch.segment_length, self.seq) for branch in self.pattern.branches))
        ranges = [branch.heads or (0, self.heads) for branch in self.pattern.branches]
        heads = min(start for start, _ in ranges), max(stop for _, stop in ranges)
        return Pattern([min(length, self.seq)], [1], heads=[heads], head_shard=self.pattern.head_shard)

    def computed(self, kv_head: int) -> Pattern | None:
        """What is computed with the rows of a segment of `moved` and the query heads of one key/value head; None: nothing."""
        if not self.is_joint:
            return Pattern.dense()
        pattern, group = self.pattern, self.heads // self.kv_heads
        first, total = pattern.head_shard or (0, self.kv_heads)
        moved_first, moved_last = self.moved.branches[0].heads or (0, self.heads)
        start, stop = max(kv_head * group, moved_first), min((kv_head + 1) * group, moved_last)  # those whose rows are moved
        served = [branch for branch in pattern.branches if any(map(branch.serves, range(start, stop)))]
        if not served:
            return None
        limits = [branch.heads or (start, stop) for branch in served]
        ranges = [(max(start, a) - start, min(stop, b) - start) for a, b in limits]
        lengths, rates = [b.segment_length for b in served], [b.dilation_rate for b in served]
        return Pattern(lengths, rates, pattern.offset, "once", ranges, (first + kv_head, total))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.cuts) - 1

    @property
    def seq(self) -> int:
        """Tokens of the whole sequence."""
        return self.cuts[-1]

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """The route of each branch; of all together where they are joint."""
        return tuple(self._route(b) for b in range(len(self.moved.branches)))

    @cached_property
    def spreads(self) -> tuple[tuple[Spread, ...], ...]:
        """For each branch the segments that several ranks hold."""
        return tuple(
            spread_segments(self._members(b), b, route.group_size, self.is_causal) for b, route in enumerate(self.routes)
        )

    @cached_property
    def tallies(self) -> tuple[Tally, ...]:
        """For each branch the counts of those segments."""
        return tuple(self.tally(b, route.group_size) for b, route in enumerate(self.routes))

    @cached_property
    def exchanges(self) -> bool:
        """Whether any rank sends rows but round a ring, or computes segments one by one."""
        return not self.fuse_branches or any(route.kind not in ("local", "ring") for route in self.routes)

    def positions(self, rank: int) -> range:
        """The positions in the sequence of the rows that a rank holds."""
        return range(*self.cuts[rank : rank + 2])

    def work(self, rank: int) -> int:
        """Query-key pairs that a rank computes, over all heads, a key seen by several branches counting each time.

        Nominal forward FLOPs are `4 * head_dim * batch` times this.
        """
        return int(self.all_work.total[rank])

    @cached_property
    def all_work(self) -> Work:
        """`work` of all ranks, by when it is done."""
        local, moved, ring = (np.zeros(self.world_size, object) for _ in range(3))
        for branch, (route, tally) in enumerate(zip(self.routes, self.tallies, strict=True)):
            (local if self.fuse_branches else moved)[:] += self._pairs_within(branch)
            (ring if route.kind == "ring" else moved)[:] += self._joint_pairs() if self.is_joint else tally.pairs
        return Work(local, moved, ring)

    def bytes(self, rank: int, phase: str, *, head_dim: int, dtype: str, batch: int = 1, key_padding_mask: bool = False) -> int:
        """Bytes of rows that a rank sends in the "forward" or the "backward" phase of one call; what `Comm.sent_bytes` counts."""
        return int(self.all_bytes(phase, head_dim=head_dim, dtype=dtype, batch=batch, key_padding_mask=key_padding_mask)[rank])

    def all_bytes(self, phase: str, *, head_dim: int, dtype: str, batch: int = 1, key_padding_mask: bool = False) -> Counts:
        """`bytes` of all ranks, `(world_size,)`."""
        return self.legs(phase, Rows(head_dim, dtype, batch, key_padding_mask)).sent

    def legs(self, phase: str, rows: Rows, branch: int | None = None) -> Legs:
        """Bytes that all ranks send and receive in a phase, by what is sent; of one branch alone if it is given."""
        one_of("phase", phase, PHASES)
        branches = range(len(self.routes)) if branch is None else [branch]
        found = (legs_of(self.tallies[b], self.routes[b].kind == "ring", phase == "backward", rows) for b in branches)
        return sum(found, Legs.none(self.world_size))

    def explain(self, rows: Rows | None = None) -> str:
        """For each branch its route, how many ranks it takes, what moves, and why: what the other routes would move.

        `rows` (`dilkit.comm.plan.traffic.Rows`) says how large rows are; by default 64 numbers in float32, and a batch of 1.
        """
        from dilkit.comm.plan.explain import explained

        return explained(self, rows or Rows(64, "float32"))

    def tally(self, branch: int, group_size: int) -> Tally:
        """What would travel for a branch in blocks of `group_size` ranks."""
        return Tally(self._members(branch), self.world_size, group_size, self.is_causal)

    def candidates(self, branch: int) -> Mapping[int, int]:
        """For each size of blocks that "auto" considers: rows that the busiest rank sends, or is sent, in a forward pass.

        The size 1 is "gather", the largest "scatter"; empty for a branch whose segments are all within ranks.
        """
        whole_segments = self.is_joint or not self.fuse_branches
        return busiest_ranks(self._members(branch), self.world_size, self.is_causal, whole_segments)

    def _members(self, branch: int) -> Members:
        return members_of(self.moved, branch, self.cuts, self.heads, self.kv_heads)

    def _route(self, branch: int) -> Route:
        widest = self._members(branch).widest
        if widest == 1:
            return Route("local", 1)
        if self.schedule == "auto":
            busiest = self.candidates(branch)
            size = min(busiest, key=busiest.__getitem__)
            return Route({1: "gather", widest: "scatter"}.get(size, "hybrid"), size)
        return Route(self.schedule, widest if self.schedule == "scatter" else 1)

    def _pairs_within(self, branch: int) -> NDArray[Any]:
        """`(world_size,)`: pairs of the segments of a branch of `moved` that are within each rank, as integers of any size."""
        segment, pattern = self.moved.branches[branch], self.pattern
        if not self.is_joint:
            alone = [segment.segment_length], [segment.dilation_rate], pattern.offset
            pattern = Pattern(*alone, heads=[segment.heads], head_shard=pattern.head_shard)
        tokens = tokens_within(segment, self.cuts)
        kinds = dict(kv_heads=self.kv_heads, is_causal=self.is_causal)
        pairs = {n: pattern.flops(n, self.heads, 1, **kinds) // 4 for n in set(tokens)}
        return np.array([pairs[n] for n in tokens], object)

    def _joint_pairs(self) -> NDArray[Any]:
        """`(world_size,)`: pairs that each rank computes of segments of joint branches that several ranks hold."""
        found = np.zeros(self.world_size, object)
        for spread in self.spreads[0]:
            for head, owner in zip(spread.heads, spread.owners[0].tolist(), strict=True):
                if pattern := self.computed(head.kv_head):
                    flops = pattern.flops(spread.stop - spread.start, head.width, 1, kv_heads=1, is_causal=self.is_causal)
                    found[owner] += flops // 4
        return found


@lru_cache(maxsize=64)
def busiest_ranks(members: Members, world_size: int, is_causal: bool, whole_segments: bool) -> Mapping[int, int]:
    """Rows of the busiest rank for each size of blocks worth a try: those that divide the widest segment, and powers of two.

    With `whole_segments`, for the widest segment's size alone.
    """
    widest = members.widest
    sizes = [size for size in range(widest, 0, -1) if widest % size == 0 or size.bit_count() == 1]
    sizes = sizes[:1] if whole_segments else sizes
    found = {size: Tally(members, world_size, size, is_causal).busiest for size in sizes if widest > 1}
    return MappingProxyType(found)


def exchange_plan(
    pattern: Pattern,
    cuts: Sequence[int],
    heads: int,
    kv_heads: int | None = None,
    *,
    is_causal: bool = False,
    schedule: str = "auto",
    fuse_branches: bool = True,
) -> ExchangePlan:
    """The plan for these shards, made once and kept; `cuts` as `shard_cuts` makes them, `kv_heads` defaults to `heads`."""
    return _made(pattern, tuple(cuts), heads, heads if kv_heads is None else kv_heads, is_causal, schedule, fuse_branches)


# Values that are equal but of another type, such as 1 and True, are told apart: one of them may be refused.
_made = lru_cache(maxsize=256, typed=True)(ExchangePlan)
