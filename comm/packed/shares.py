"""Which rank gets what of packed sequences: whole ones by their work, or shards that begin where sequences do."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate
from math import lcm

from dilkit.checks import check_type, integer
from dilkit.comm.cuts import MOST_RANKS, MOST_UNEVEN, segment_lengths, shard_cuts
from dilkit.pattern import Pattern


def share_sequences(
    lengths: Sequence[int], world_size: int, pattern: Pattern, heads: int, *, is_causal: bool = False
) -> tuple[tuple[int, ...], ...]:
    """For each rank the sequences that it gets whole, as ascending numbers into `lengths`, so that ranks have about equal work.

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
    """Where shards of a packing begin, as `dilkit.comm.shard_cuts` says it of one sequence.

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
    """The place within `slack` of `cut` where a sequence begins, or as many segments as possible of the one that is cut."""
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
