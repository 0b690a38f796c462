"""Counts of the segments that are within one rank."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from dilkit.comm.plan.spread import Counts, local_range, served_heads
from dilkit.pattern import DilatedSegment, Pattern


def tokens_within(segment: DilatedSegment, cuts: tuple[int, ...]) -> list[int]:
    """How many tokens of each rank are in segments that are within it."""
    length = _length(segment, cuts)
    ranges = (local_range(length, start, stop, cuts[-1]) for start, stop in pairwise(cuts))
    return [stop - start for start, stop in ranges]


def rows_within(pattern: Pattern, branch: int, cuts: tuple[int, ...], heads: int, kv_heads: int) -> tuple[Counts, Counts]:
    """`(world_size,)` each: rows of queries and of keys that are kept of each rank's own segments, over all heads."""
    segment = pattern.branches[branch]
    length = _length(segment, cuts)
    full, tail = np.divmod(np.array(tokens_within(segment, cuts), np.int64), length)
    queries, keys = np.zeros((2, len(full)), np.int64)
    for head in served_heads(pattern, segment, heads, kv_heads):
        of_full, of_tail = (np.maximum(-((head.offset - n) // segment.dilation_rate), 0) for n in (length, tail))
        rows = full * of_full + of_tail
        queries, keys = queries + head.width * rows, keys + rows
    return queries, keys


def _length(segment: DilatedSegment, cuts: tuple[int, ...]) -> int:
    return max(min(segment.segment_length, cuts[-1]), 1)
