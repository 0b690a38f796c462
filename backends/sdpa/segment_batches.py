"""Segments of packed sequences side by side in batches, each of which one call of a kernel computes.

    row(p, h, t) = first_p + offset_h + t * rate,   t = 0 .. rows - 1        of segment p and key/value head h

Segments of all sequences that keep about as many rows share a batch: `rows` is rounded up, and what lies beyond a segment's end
is padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dilkit.backends.sdpa.grids import rectangles
from dilkit.backends.sdpa.strided_calls import MAX_PROBLEMS_PER_AXIS
from dilkit.pattern.lowering import Segments
from dilkit.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ROWS_AT_ONCE = 2**17
"""Rows of all query heads in a batch, about: what is gathered for a call stays small beside long inputs."""

_BITS = 4
"""A number of rows is rounded up to so many binary digits: less than an eighth of a batch is padding."""

Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class SegmentBatch:
    """Segments of one branch: `problems` are segments times key/value heads, with `group` query heads each.

    `queries`, int64 `(problems, group, rows)`, and `keys`, `(problems, 1, rows)`, say where each row is among the rows of all
    heads `(total * heads, head_dim)`; padding, where there is any, points to the row after the last of them.
    """

    queries: Tensor
    keys: Tensor
    padding: Tensor | None
    """bool `(problems, 1, rows)`."""
    first: bool
    """True if no batch before it had any of its rows."""


def segment_batches(problem: Problem, cu_seqlens: Tensor | None, total: int) -> Iterator[SegmentBatch]:
    """Return batches of segments that hold each kept row of a branch exactly once.

    On a GPU this waits for `cu_seqlens`: the sizes of the calls depend on it.
    """
    assert cu_seqlens is not None
    starts = cu_seqlens.cpu().numpy().astype(np.int64)
    lengths = np.diff(starts)
    for branch, heads in branch_heads(problem):
        sequence, inside, span = segments(np.zeros_like(lengths), lengths, branch.length)
        first = starts[sequence] + inside
        for some, rows in of_equal_size(span, branch.rate, ROWS_AT_ONCE // heads.count, MAX_PROBLEMS_PER_AXIS // heads.kv_count):
            yield _batch(heads, first[some], span[some], rows, branch, total, cu_seqlens.device)


class Dilation(NamedTuple):
    """A branch cut to the longest sequence; `first`: the first branch, of all heads."""

    length: int
    rate: int
    first: bool


@dataclass(frozen=True)
class HeadBlock:
    """A block of heads: `kv_count` key/value heads, of each of which the same `group` query heads; and what they keep."""

    kv_first: int
    kv_count: int
    query_first: int
    group: int
    offsets: Int64Array
    sizes: tuple[int, int]
    """Query heads and key/value heads of the whole."""

    @property
    def count(self) -> int:
        return self.kv_count * self.group

    def numbers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the numbers of query heads `(kv_count, group, 1)` and key/value heads `(kv_count, 1, 1)`."""
        import torch

        heads, kv_heads = self.sizes
        kv_head = torch.arange(self.kv_count, device=device)[:, None, None]
        each = torch.arange(self.group, device=device)[:, None]
        return self.query_first + kv_head * (heads // kv_heads) + each, self.kv_first + kv_head


def branch_heads(problem: Problem) -> Iterator[tuple[Dilation, HeadBlock]]:
    most, group = problem.seq, problem.heads // problem.kv_heads
    for number, form in enumerate(problem.forms):
        if not isinstance(form, Segments):
            call = problem.pattern.branches[form.branch].call()
            raise TypeError(f"branch {call} is lowered to {form.name}; backend sdpa computes segments only")
        start, stop = form.heads
        cut = Dilation(min(form.length, most), min(form.rate, most), number == 0 and form.heads == (0, problem.heads))
        for kv_first, kv_count, own_first, own_count in rectangles(start, stop, group):
            block = kv_first, kv_count, kv_first * group + own_first, own_count
            offsets = [min(form.offsets[block[2] + i * group - start], most) for i in range(kv_count)]
            yield cut, HeadBlock(*block, np.array(offsets, np.int64), (problem.heads, problem.kv_heads))


def segments(begins: Int64Array, ends: Int64Array, length: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return the segments of `length` that overlap rows `begins` to `ends - 1` of each sequence.

    Returns the sequence that each is of, its first row there, and its number of rows up to the sequence's end.
    """
    lowest = begins // length
    counts = (ends - 1) // length - lowest + 1
    sequence = np.repeat(np.arange(len(ends)), counts)
    first = (lowest[sequence] + np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)) * length
    return sequence, first, np.minimum(length, ends[sequence] - first)


def of_equal_size(
    span: Int64Array, rate: int, most_rows: int, most_segments: int = MAX_PROBLEMS_PER_AXIS
) -> Iterator[tuple[Int64Array, int]]:
    """Group segments by their kept rows, rounded up: indices and rows. A group has at most `most_rows` rows or one segment."""
    row_counts = -(-span // rate)
    step = 2 ** np.maximum(np.frexp(row_counts)[1] - _BITS, 0)
    rounded = np.minimum(-(-row_counts // step) * step, row_counts.max(initial=0))
    for rows in np.unique(rounded):
        segments = np.flatnonzero(rounded == rows)
        at_once = int(min(max(1, most_rows // rows), max(1, most_segments)))
        for i in range(0, len(segments), at_once):
            yield segments[i : i + at_once], int(rows)


def _batch(
    heads: HeadBlock, first: Int64Array, span: Int64Array, rows: int, branch: Dilation, total: int, device: torch.device
) -> SegmentBatch:
    import torch

    begin, length, offsets = (torch.from_numpy(x).to(device, non_blocking=True) for x in (first, span, heads.offsets))
    inside = offsets[:, None] + branch.rate * torch.arange(rows, device=device)
    padding = inside >= length[:, None, None]
    padded = bool(heads.offsets.max() + branch.rate * (rows - 1) >= span.min())
    row = begin[:, None, None] + inside

    def places(head: Tensor, all_heads: int) -> Tensor:
        """Return the numbers `(segments * kv_count, heads of each, rows)` of rows in the flat tensor of all heads."""
        numbers = row[:, :, None] * all_heads + head
        if padded:
            numbers.masked_fill_(padding[:, :, None], total * all_heads)
        return numbers.flatten(0, 1)

    queries, keys = (places(*x) for x in zip(heads.numbers(device), heads.sizes, strict=True))
    return SegmentBatch(queries, keys, padding.view(-1, 1, rows) if padded else None, branch.first)
