"""The segments that lie within one rank's shard: which tokens they cover, and how many rows are kept of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dilkit.comm.plan.sharded_segments import IntArray, ShardedSegment, segment_tokens, served_heads, shards_of_segments
from dilkit.pattern import DilatedSegment, Pattern


def local_range(length: int, start: int, stop: int, seq: int) -> tuple[int, int]:
    """The rows of `start .. stop - 1` whose segment of `length` tokens is whole there; `(start, start)` if there are none."""
    first, last = -(-start // length) * length, seq if stop == seq else stop // length * length
    return (first, last) if first < last else (start, start)


def local_tokens(segment: DilatedSegment, cuts: tuple[int, ...]) -> list[int]:
    """How many tokens of each rank are in segments that lie within its shard."""
    length = segment_tokens(segment, cuts[-1])
    ranges = (local_range(length, start, stop, cuts[-1]) for start, stop in pairwise(cuts))
    return [stop - start for start, stop in ranges]


def local_row_counts(
    pattern: Pattern, branch: int, cuts: tuple[int, ...], heads: int, kv_heads: int
) -> tuple[IntArray, IntArray]:
    """`(world_size,)` each: the query rows and key rows that a branch keeps of each rank's local segments, over all heads."""
    segment = pattern.segments[branch]
    length = segment_tokens(segment, cuts[-1])
    full, tail = np.divmod(np.array(local_tokens(segment, cuts), np.int64), length)
    queries, keys = np.zeros((2, len(full)), np.int64)
    for head in served_heads(pattern, segment, heads, kv_heads):
        of_full, of_tail = (np.maximum(-((head.offset - n) // segment.dilation_rate), 0) for n in (length, tail))
        rows = full * of_full + of_tail
        queries, keys = queries + head.width * rows, keys + rows
    return queries, keys


def local_segments(
    pattern: Pattern, branch: int, cuts: Sequence[int], rank: int, heads: int, kv_heads: int, is_causal: bool
) -> tuple[ShardedSegment, ...]:
    """The segments of a branch within the shard of `rank`, each as a sharded segment that this rank alone holds."""
    segment, edges = pattern.segments[branch], np.array(cuts, np.int64)
    length = segment_tokens(segment, cuts[-1])
    starts = np.arange(*local_range(length, cuts[rank], cuts[rank + 1], cuts[-1]), length)
    served = served_heads(pattern, segment, heads, kv_heads)
    return shards_of_segments(starts, length, segment.dilation_rate, served, edges).split(branch, 1, is_causal)
