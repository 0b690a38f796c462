"""The segments that lie within one rank's shard: which tokens they cover, and how many rows are kept of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dilkit.comm.plan.divided import DividedForms
from dilkit.comm.plan.sharded_segments import IntArray, ShardedSegment, segment_tokens, served_heads, shards_of_segments
from dilkit.pattern.lowering import Segments


def local_range(length: int, start: int, stop: int, seq: int) -> tuple[int, int]:
    """The rows of `start .. stop - 1` whose segment of `length` tokens is whole there; `(start, start)` if there are none."""
    first, last = -(-start // length) * length, seq if stop == seq else stop // length * length
    return (first, last) if first < last else (start, start)


def local_tokens(length: int, cuts: tuple[int, ...]) -> list[int]:
    """How many tokens of each rank are in segments of `length` tokens that lie within its shard."""
    ranges = (local_range(length, start, stop, cuts[-1]) for start, stop in pairwise(cuts))
    return [stop - start for start, stop in ranges]


def local_row_counts(forms: DividedForms, cuts: tuple[int, ...], heads: int, kv_heads: int) -> tuple[IntArray, IntArray]:
    """`(world_size,)` each: the query rows and key rows that are kept of each rank's local segments, over all heads."""
    form = _segments(forms)
    length = segment_tokens(form, cuts[-1])
    full, tail = np.divmod(np.array(local_tokens(length, cuts), np.int64), length)
    queries, keys = np.zeros((2, len(full)), np.int64)
    for head in served_heads(forms, heads, kv_heads):
        of_full, of_tail = (np.maximum(-((head.offset - n) // form.rate), 0) for n in (length, tail))
        rows = full * of_full + of_tail
        queries, keys = queries + head.width * rows, keys + rows
    return queries, keys


def local_segments(
    forms: DividedForms, branch: int, cuts: Sequence[int], rank: int, heads: int, kv_heads: int, is_causal: bool
) -> tuple[ShardedSegment, ...]:
    """The segments of a branch within the shard of `rank`, each as a sharded segment that this rank alone holds."""
    form, edges = _segments(forms), np.array(cuts, np.int64)
    length = segment_tokens(form, cuts[-1])
    starts = np.arange(*local_range(length, cuts[rank], cuts[rank + 1], cuts[-1]), length)
    return shards_of_segments(starts, length, form.rate, served_heads(forms, heads, kv_heads), edges).split(branch, 1, is_causal)


def _segments(forms: DividedForms) -> Segments:
    form = forms[0]
    assert isinstance(form, Segments)
    return form
