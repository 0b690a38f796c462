"""Cuts of a sequence into shards. This needs no torch: exchange plans are made where nothing is computed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import lcm

from dilkit.checks import check_type, integer
from dilkit.pattern import Pattern

MOST_RANKS = 2**20
"""More ranks than this are taken for a mistake: a plan for them would take hours."""
MOST_UNEVEN = 1.03
"""Factor by which the largest shard may exceed the mean so that segments need not be cut."""


def checked_cuts(cuts: Sequence[int]) -> tuple[int, ...]:
    """Return `cuts` as a tuple. Raises TypeError or ValueError unless they are integers that start at 0 and grow."""
    if isinstance(cuts, str) or not isinstance(cuts, Sequence):
        raise TypeError(f"cuts={cuts!r} is a {type(cuts).__name__}; a sequence of integers is needed, as shard_cuts makes it")
    checked = tuple(integer(f"cuts[{i}]", cut) for i, cut in enumerate(cuts))
    rows = [stop - start for start, stop in pairwise(checked)]
    held = [rank for rank, count in enumerate(rows) if count]
    if checked[:1] != (0,) or not held or min(rows) < 0 or len(held) <= held[-1] - held[0]:
        raise ValueError(
            f"cuts={checked} must start at 0 and grow: every rank holds at least one row, but for the first and the last"
        )
    return checked


def shard_cuts(seq: int, world_size: int, pattern: Pattern | None = None) -> tuple[int, ...]:
    """Return where shards begin, `world_size + 1` integers: rank t holds the rows `cuts[t] .. cuts[t + 1] - 1`.

    Shards are about `seq / world_size` tokens long. With a pattern, they begin where segments and blocks do, as far as that makes
    no shard more than 3 % longer than the mean: segments within a shard need no communication.

    Raises ValueError for fewer tokens than ranks, TypeError for what is no `dilkit.Pattern`.

        >>> from dilkit import Pattern
        >>> from dilkit.comm import shard_cuts
        >>> shard_cuts(1000, 3)
        (0, 333, 666, 1000)
        >>> shard_cuts(1000, 3, Pattern([8, 16], [1, 2]))  # at multiples of 16
        (0, 336, 672, 1000)
    """
    seq, world_size = integer("seq", seq, at_least=0), integer("world_size", world_size, at_least=1)
    check_type("pattern", pattern, (Pattern, type(None)), "a dilkit.Pattern is needed")
    if world_size > MOST_RANKS:
        raise ValueError(f"world_size={world_size} must be at most {MOST_RANKS:,}")
    if seq < world_size:
        raise ValueError(f"seq={seq} tokens cannot be shared out over world_size={world_size} ranks; at least one token each")
    lengths = sorted({min(length, seq) for length in segment_lengths(pattern)})
    for step in reversed(list(accumulate(lengths, lcm))):
        cuts = (*(round(t * seq / (world_size * step)) * step for t in range(world_size)), seq)
        sizes = [stop - start for start, stop in pairwise(cuts)]
        if min(sizes) > 0 and max(sizes) <= MOST_UNEVEN * seq / world_size:
            return cuts
    return tuple(t * seq // world_size for t in range(world_size + 1))


def segment_lengths(pattern: Pattern | None) -> list[int]:
    """Return the lengths of the segments and blocks of a pattern, which cuts should keep whole."""
    branches = () if pattern is None else pattern.branches
    return [branch.unit for branch in branches if branch.unit]
