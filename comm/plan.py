"""The exchange plan: who computes what, and what has to travel for that. A pure value; nothing is sent to make it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import lcm

import numpy as np

from dilkit.checks import boolean, integer, one_of
from dilkit.comm.spread import Counts, Spread, local_range, spread_segments
from dilkit.pattern import DilatedSegment, Pattern
from dilkit.problem import DTYPE_BYTES, DTYPES

SCHEDULES = ("auto", "scatter", "gather", "ring")
PHASES = ("forward", "backward")


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
        return Pattern([min(length, self.seq)], [1], head_shard=self.pattern.head_shard)

    def computed(self, kv_head: int) -> Pattern | None:
        """What is computed with the rows of a segment of `moved` and the query heads of one key/value head; None: nothing."""
        if not self.is_joint:
            return Pattern.dense()
        pattern, group = self.pattern, self.heads // self.kv_heads
        first, total = pattern.head_shard or (0, self.kv_heads)
        start, stop = kv_head * group, (kv_head + 1) * group
        served = {
            branch: (max(start, a) - start, min(stop, b) - start)
            for branch in pattern.branches
            for a, b in [branch.heads or (0, self.heads)]
            if a < stop and start < b
        }
        if not served:
            return None
        lengths, rates = [b.segment_length for b in served], [b.dilation_rate for b in served]
        return Pattern(lengths, rates, pattern.offset, "once", list(served.values()), (first + kv_head, total))

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
        return tuple(self._spreads(b, route.group_size) for b, route in enumerate(self.routes))

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
        return int(self._work[rank])

    def bytes(self, rank: int, phase: str, *, head_dim: int, dtype: str, batch: int = 1, key_padding_mask: bool = False) -> int:
        """Bytes of rows that a rank sends in the "forward" or the "backward" phase of one call; what `Comm.sent_bytes` counts."""
        return int(self.all_bytes(phase, head_dim=head_dim, dtype=dtype, batch=batch, key_padding_mask=key_padding_mask)[rank])

    def all_bytes(self, phase: str, *, head_dim: int, dtype: str, batch: int = 1, key_padding_mask: bool = False) -> Counts:
        """`bytes` of all ranks, `(world_size,)`."""
        one_of("phase", phase, PHASES)
        one_of("dtype", dtype, DTYPES)
        row, number = head_dim * DTYPE_BYTES[dtype], 8 if dtype == "float64" else 4
        flag = int(key_padding_mask)
        total = np.zeros(self.world_size, np.int64)
        for spread, ring in self._all_spreads():
            if ring:
                hops, grads = ring_keys_sent(spread)
                sent = hops * (2 * row + flag) + (grads * 2 * row if phase == "backward" else 0)
            elif phase == "forward":
                sent = spread.queries_sent() * row + spread.keys_sent() * (2 * row + flag)
                sent = sent + spread.queries_received() * (row + number)
            else:
                sent = spread.queries_sent() * (row + 2 * number)
                sent = sent + spread.queries_received() * row + spread.keys_received() * 2 * row
            total[spread.ranks] += sent
        return total * batch

    @cached_property
    def _work(self) -> Counts:
        total = np.zeros(self.world_size, np.int64)
        for branch in self.moved.branches:
            length = max(min(branch.segment_length, self.seq), 1)
            ranges = (local_range(length, start, stop, self.seq) for start, stop in pairwise(self.cuts))
            sizes = np.array([last - first for first, last in ranges])
            for size in np.unique(sizes).tolist():
                total[sizes == size] += self._pairs(branch, size)
        for spread, _ in self._all_spreads():
            total[spread.ranks] += self._joint_pairs(spread) if self.is_joint else spread.pairs()
        return total

    def _pairs(self, branch: DilatedSegment, rows: int) -> int:
        """Pairs of whole segments of a branch of `moved`, `rows` rows in all."""
        pattern, rest = self.pattern, dict(kv_heads=self.kv_heads, is_causal=self.is_causal)
        if not self.is_joint:
            one, heads = [branch.dilation_rate], [branch.heads]
            pattern = Pattern([branch.segment_length], one, pattern.offset, heads=heads, head_shard=pattern.head_shard)
        return pattern.flops(rows, self.heads, 1, **rest) // 4

    def _joint_pairs(self, spread: Spread) -> Counts:
        """`(len(ranks),)`: pairs that each rank computes of a segment of joint branches."""
        found = np.zeros(len(spread.ranks), np.int64)
        for head, owner in zip(spread.heads, spread.owners[0].tolist(), strict=True):
            if pattern := self.computed(head.kv_head):
                flops = pattern.flops(spread.stop - spread.start, head.width, 1, kv_heads=1, is_causal=self.is_causal)
                found[owner - int(spread.ranks[0])] += flops // 4
        return found

    def _all_spreads(self) -> Iterator[tuple[Spread, bool]]:
        for route, spreads in zip(self.routes, self.spreads, strict=True):
            for spread in spreads:
                yield spread, route.kind == "ring"

    def _spreads(self, branch: int, group_size: int) -> tuple[Spread, ...]:
        return spread_segments(self.moved, branch, self.cuts, self.heads, self.kv_heads, self.is_causal, group_size)

    def _route(self, branch: int) -> Route:
        widest = max((len(spread.ranks) for spread in self._spreads(branch, 1)), default=1)
        if widest == 1:
            return Route("local", 1)
        if self.schedule == "auto":
            whole = self.is_joint or not self.fuse_branches
            sizes = [widest] if whole else [size for size in range(widest, 0, -1) if widest % size == 0]
            size = min(sizes, key=lambda size: self._busiest(branch, size))
            return Route({1: "gather", widest: "scatter"}.get(size, "hybrid"), size)
        return Route(self.schedule, widest if self.schedule == "scatter" else 1)

    def _busiest(self, branch: int, group_size: int) -> int:
        """Rows that the busiest rank sends or is sent for a branch, in a forward pass."""
        sent, received = np.zeros((2, self.world_size), np.int64)
        for spread in self._spreads(branch, group_size):
            there, back = spread.queries_sent(), spread.queries_received()
            sent[spread.ranks] += there + back + 2 * spread.keys_sent()
            received[spread.ranks] += there + back + 2 * spread.keys_received()
        return int(np.maximum(sent, received).max())


def ring_keys_sent(spread: Spread) -> tuple[Counts, Counts]:
    """`(len(ranks),)` each: rows of keys that a rank sends on in all hops, and rows of their gradients that it sends home.

    A block goes from each rank to the next; if causal, only on to the ranks after its own, else around to all others.
    """
    held = spread.rows.sum(1)
    if spread.is_causal:
        before = np.cumsum(held)
        hops = before.copy()
        hops[-1] = 0
        return hops, before - held
    return held.sum() - np.roll(held, -1), held.sum() - held


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
