"""Where a sequence is cut into shards. This needs no torch: exchange plans are made where nothing is computed."""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import lcm

from dilkit.checks import integer
from dilkit.pattern import Pattern

MOST_UNEVEN = 1.03
"""By how much the largest shard may exceed the mean so that segments need not be cut."""


def shard_cuts(seq: int, world_size: int, pattern: Pattern | None = None) -> tuple[int, ...]:
    """Where shards begin, `world_size + 1` integers: rank t holds the rows `cuts[t] .. cuts[t + 1] - 1`.

    Shards are about `seq / world_size` tokens long. With a pattern, they begin where segments do, as far as that makes no shard
    more than 3 % longer than the mean: segments within a shard need no communication.

    Raises ValueError for fewer tokens than ranks, TypeError for what is no `dilkit.Pattern`.

        >>> from dilkit import Pattern
        >>> from dilkit.comm import shard_cuts
        >>> shard_cuts(1000, 3)
        (0, 333, 666, 1000)
        >>> shard_cuts(1000, 3, Pattern([8, 16], [1, 2]))  # at multiples of 16
        (0, 336, 672, 1000)
    """
    seq, world_size = integer("seq", seq, at_least=0), integer("world_size", world_size, at_least=1)
    if pattern is not None and not isinstance(pattern, Pattern):
        raise TypeError(f"pattern={pattern!r} is a {type(pattern).__name__}; a dilkit.Pattern is needed")
    if seq < world_size:
        raise ValueError(f"seq={seq} tokens cannot be shared out over world_size={world_size} ranks; at least one token each")
    lengths = sorted({min(branch.segment_length, seq) for branch in pattern.branches}) if pattern else []
    for step in reversed(list(accumulate(lengths, lcm))):
        cuts = (*(round(t * seq / (world_size * step)) * step for t in range(world_size)), seq)
        sizes = [stop - start for start, stop in pairwise(cuts)]
        if min(sizes) > 0 and max(sizes) <= MOST_UNEVEN * seq / world_size:
            return cuts
    return tuple(t * seq // world_size for t in range(world_size + 1))
