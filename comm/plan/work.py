"""How many query-key pairs each rank computes, as integers of any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilkit.comm.plan.sharded_segments import ShardedSegment
from dilkit.pattern import Pattern

Pairs = NDArray[Any]


@dataclass(frozen=True)
class Work:
    """Pairs that each rank computes, `(world_size,)` each.

    `local`: in segments within its shard; `moved`: with rows moved to it; `ring`: with blocks that go round a ring.
    """

    local: Pairs
    moved: Pairs
    ring: Pairs

    @property
    def total(self) -> Pairs:
        """All pairs."""
        total: Pairs = self.local + self.moved + self.ring
        return total


def local_pairs(patterns: Sequence[tuple[Pattern, int]], heads: int, kv_heads: int, is_causal: bool) -> Pairs:
    """`(world_size,)`: pairs of the pattern that each rank applies to so many of its rows by itself."""
    options: dict[str, Any] = dict(kv_heads=kv_heads, is_causal=is_causal)
    pairs = {(pattern, n): pattern.flops(n, heads, 1, **options) // 4 if n else 0 for pattern, n in set(patterns)}
    return np.array([pairs[one] for one in patterns], object)


def joint_pairs(segments: Sequence[ShardedSegment], pattern_of: Callable[[int], Pattern | None], world_size: int) -> Pairs:
    """`(world_size,)`: pairs of joint branches in sharded segments; `pattern_of(kv_head)` is what a head's rows follow there."""
    pairs = np.zeros(world_size, object)
    for segment in segments:
        for head, rank in zip(segment.heads, segment.compute_ranks[0].tolist(), strict=True):
            if pattern := pattern_of(head.kv_head):
                tokens = segment.stop - segment.start
                pairs[rank] += pattern.flops(tokens, head.width, 1, kv_heads=1, is_causal=segment.is_causal) // 4
    return pairs
