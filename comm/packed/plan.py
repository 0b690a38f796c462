"""The plan for packed sequences over ranks: which of them a rank has whole, and what is exchanged for those that are cut.

    rank         |------- 0 -------|------- 1 -------|------- 2 -------|
    sequences    |- 0 -|- 1 -|--------------- 2 ---------------|-- 3 --|
                  whole whole            cut, 3 ranks            whole

A cut between ranks goes through one sequence at most. So there are at most p - 1 sequences of which several of p ranks have rows,
each with an exchange plan of its own; all others are whole on a rank, and nothing is sent for them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from math import lcm
from typing import Any, NamedTuple

from dilkit.checks import check_type, integer
from dilkit.comm.cuts import MOST_RANKS, MOST_UNEVEN, checked_cuts, segment_lengths, shard_cuts
from dilkit.comm.plan.exchange_plan import ExchangePlan, exchange_plan
from dilkit.pattern import Pattern


class CutSequence(NamedTuple):
    """The sequence of the rows `start .. stop - 1` of the packing, which several ranks hold."""

    start: int
    stop: int
    plan: ExchangePlan

    def rows(self, rank: int, first: int) -> slice:
        """Return the slice of these rows in the shard of a rank that begins at row `first` of the packing."""
        low, high = self.plan.cuts[rank : rank + 2]
        return slice(self.start + low - first, self.start + high - first) if low < high else slice(0, 0)


class WholeSequences(NamedTuple):
    """The sequences that a rank has whole: they begin at its rows `starts[:-1]`, and `starts[-1]` is where the last one ends."""

    starts: tuple[int, ...]

    @property
    def rows(self) -> slice:
        return slice(self.starts[0], self.starts[-1]) if self.starts else slice(0, 0)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in pairwise(self.starts))


@dataclass(frozen=True)
class PackedPlan:
    """Computation and exchanges of ranks for one call with packed sequences. Rank t holds the rows `cuts[t] .. cuts[t + 1] - 1`.

    `starts`: where the sequences begin, and the end of the last. `schedule` and `keep` are those of `ExchangePlan`. Making it
    sends nothing.

    Raises ValueError or TypeError for cuts or starts that do not grow from 0 to the same number of rows, and what `ExchangePlan`
    raises.

        >>> from dilkit import Pattern
        >>> from dilkit.comm import PackedPlan
        >>> plan = PackedPlan(Pattern([8, 16], [1, 2]), cuts=(0, 20, 40), starts=(0, 6, 10, 34, 40), heads=4, kv_heads=4)
        >>> [(cut.start, cut.stop) for cut in plan.cut_sequences], plan.whole(0).lengths, plan.whole(1).lengths
        ([(10, 34)], (6, 4), (6,))
        >>> plan.bytes(0, "forward", head_dim=8, dtype="float32")
        1596
    """

    pattern: Pattern
    cuts: tuple[int, ...]
    starts: tuple[int, ...]
    heads: int
    kv_heads: int
    is_causal: bool = False
    schedule: str = "auto"
    keep: str = "rows"

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", checked_cuts(self.cuts))
        starts = tuple(integer(f"starts[{i}]", start) for i, start in enumerate(self.starts))
        if not starts or starts[0] != 0 or starts[-1] != self.cuts[-1] or any(a > b for a, b in pairwise(starts)):
            raise ValueError(
                f"starts={starts} must grow from 0 to the {self.cuts[-1]} rows of all ranks: first rows, then the end"
            )
        object.__setattr__(self, "starts", starts)
        lengths = sorted({stop - start for start, stop in pairwise(starts) if start < stop})
        self._plan((0, lengths[-1]))  # raises for what fits no sequence, also where none is cut
        for length in lengths:
            self.pattern.check_seq(length)

    @cached_property
    def cut_sequences(self) -> tuple[CutSequence, ...]:
        """The sequences that several ranks hold parts of, in order."""
        pieces = []
        for i in sorted({bisect_right(self.starts, cut) - 1 for cut in self.cuts[1:-1]}):
            start, stop = self.starts[i : i + 2]
            cuts = tuple(min(max(cut, start), stop) - start for cut in self.cuts)
            if sum(a < b for a, b in pairwise(cuts)) > 1:
                pieces.append(CutSequence(start, stop, self._plan(cuts)))
        return tuple(pieces)

    def _plan(self, cuts: tuple[int, ...]) -> ExchangePlan:
        options: dict[str, Any] = dict(is_causal=self.is_causal, schedule=self.schedule, keep=self.keep)
        return exchange_plan(self.pattern, cuts, self.heads, self.kv_heads, **options)

    def whole(self, rank: int) -> WholeSequences:
        """Return the sequences that lie entirely within a rank."""
        if not 0 <= integer("rank", rank) < len(self.cuts) - 1:
            raise ValueError(f"rank={rank} is no rank of this plan; ranks are 0 to {len(self.cuts) - 2}")
        first, last = self.cuts[rank : rank + 2]
        here = self.starts[bisect_left(self.starts, first) : bisect_right(self.starts, last)]
        return WholeSequences(tuple(start - first for start in here))

    def bytes(self, rank: int, phase: str, *, head_dim: int, dtype: str, gradients: str = "qkv") -> int:
        """Count the bytes of rows that a rank sends in the "forward" or the "backward" phase of one call."""
        sizes: dict[str, Any] = dict(head_dim=head_dim, dtype=dtype, gradients=gradients)
        return sum(cut.plan.bytes(rank, phase, **sizes) for cut in self.cut_sequences)

    def work(self, rank: int) -> int:
        """The number of query-key pairs that a rank computes in all heads; a key counts once per branch that sees it."""
        options: dict[str, Any] = dict(kv_heads=self.kv_heads, is_causal=self.is_causal)
        alone: int = sum(self.pattern.flops(n, self.heads, 1, **options) // 4 for n in self.whole(rank).lengths)
        return alone + sum(cut.plan.work(rank) for cut in self.cut_sequences)


def share_sequences(
    lengths: Sequence[int], world_size: int, pattern: Pattern, heads: int, *, is_causal: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Assign whole sequences to ranks of about equal work: for each rank, ascending indices into `lengths`.

    Work is query-key pairs (`Pattern.flops`). The sequence with the most goes first, each to the rank with the least so far. So
    the busiest rank has at most 4/3 of the work that it would have at best (Graham, 1969). Each rank packs its own and calls
    `dilkit.dilated_attention_varlen`: nothing is sent.

    Raises TypeError or ValueError for what are no lengths, for a pattern or heads that do not fit, and a world size below 1.

        >>> from dilkit import Pattern
        >>> from dilkit.comm import share_sequences
        >>> share_sequences([100, 7, 60, 0, 44], 2, Pattern([16, 64], [1, 4]), heads=8)
        ((0, 1), (2, 3, 4))
    """
    check_type("pattern", pattern, Pattern, "a dilkit.Pattern is needed")
    checked = _checked(lengths)
    by_length = {n: pattern.flops(n, heads, 1, is_causal=is_causal) for n in {*checked}}
    work = [by_length[n] for n in checked]
    size = integer("world_size", world_size, at_least=1)
    if size > MOST_RANKS:
        raise ValueError(f"world_size={size} must be at most {MOST_RANKS:,}")
    loads, shares = [(0, rank) for rank in range(size)], [list[int]() for _ in range(size)]
    heapify(loads)
    for i in sorted(range(len(work)), key=lambda i: -work[i]):
        load, rank = loads[0]
        shares[rank].append(i)
        heapreplace(loads, (load + work[i], rank))
    return tuple(tuple(sorted(share)) for share in shares)


def packed_cuts(lengths: Sequence[int], world_size: int, pattern: Pattern | None = None) -> tuple[int, ...]:
    """Return where shards of a packing begin, as `dilkit.comm.shard_cuts` says it of one sequence.

    Shards are about `sum(lengths) / world_size` rows long. They begin where sequences do, else with a pattern where segments of
    the sequence do that is cut, as far as that makes no shard more than 3 % longer than the mean.

    Raises TypeError or ValueError for what are no lengths, fewer rows than ranks, and for what is no `dilkit.Pattern`.

        >>> from dilkit import Pattern
        >>> from dilkit.comm import packed_cuts
        >>> packed_cuts([335, 10, 655], 3, Pattern([8, 16], [1, 2]))  # a sequence begins at 335; 665 is 345 + 20 * 16
        (0, 335, 665, 1000)
    """
    starts = tuple(accumulate(_checked(lengths), initial=0))
    check_type("pattern", pattern, (Pattern, type(None)), "a dilkit.Pattern is needed")
    even = shard_cuts(starts[-1], world_size)
    slack = int((MOST_UNEVEN - 1) / 2 * starts[-1] / world_size)  # at each end of a shard
    segments = segment_lengths(pattern)
    return (0, *(_nearest(cut, starts, segments, slack) for cut in even[1:-1]), starts[-1])


def _nearest(cut: int, starts: tuple[int, ...], segments: Sequence[int], slack: int) -> int:
    """Return the cut within `slack` of `cut` at which a sequence begins, or which keeps most segments of a sequence whole."""
    after = bisect_left(starts, cut)
    first = starts[after - 1]
    steps = [step for step in accumulate(sorted(segments), lcm) if step < starts[after] - first]
    places = [min(starts[after - 1 : after + 1], key=lambda start: abs(start - cut))]
    places += [first + round((cut - first) / step) * step for step in reversed(steps)]
    return next((place for place in places if abs(place - cut) <= slack), cut)


def _checked(lengths: Sequence[int]) -> list[int]:
    if isinstance(lengths, str) or not isinstance(lengths, Sequence):
        raise TypeError(f"lengths={lengths!r} is a {type(lengths).__name__}; a sequence of integers is needed")
    return [integer(f"lengths[{i}]", n, at_least=0) for i, n in enumerate(lengths)]
