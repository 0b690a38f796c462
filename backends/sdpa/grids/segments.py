"""Segments as grids of small problems: one for each segment and head, whose rows are queries and keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dilkit.backends.sdpa.grids.problem_grid import GridAxis, ProblemGrid, offset_runs, rectangles
from dilkit.pattern.lowering import Segments


class _HeadBlock(NamedTuple):
    """Heads whose offsets are evenly spaced: where they begin, and the three axes that they make."""

    offset: int
    kv_head: int
    head: int
    equal_offsets: GridAxis
    one_kv_head: GridAxis
    by_offset: GridAxis
    """Heads of consecutive offsets; its row step is 1."""


def segment_grids(form: Segments, seq: int, group: int, is_causal: bool) -> Iterator[ProblemGrid]:
    """The segments of a form, with `group` query heads to a key/value head: each row that a head keeps is in one problem."""
    length, rate = min(form.length, seq), form.rate
    count, tail = divmod(seq, length)
    spans = [(0, GridAxis(count, row=length), length)]
    if tail:
        spans.append((count * length, GridAxis(1), tail))
    for block in _head_blocks(form, group):
        for start, segments, span in spans:
            for skip, offsets, rows in offset_runs(block.offset, block.by_offset.size, span, rate):
                axes = (segments, block.equal_offsets, block.by_offset._replace(size=offsets), block.one_kv_head)
                yield ProblemGrid(
                    rows=rows,
                    row_step=min(rate, seq),  # a step beyond the sequence is never made, and 2**62 is no stride
                    row=start + block.offset + skip,
                    head=block.head + skip * block.by_offset.head,
                    kv_head=block.kv_head + skip * block.by_offset.kv_head,
                    axes=tuple(axis for axis in axes if axis.size > 1),
                    keys=rows,
                    seen="earlier" if is_causal else "all",
                )


def _head_blocks(form: Segments, group: int) -> Iterator[_HeadBlock]:
    start, stop = form.heads
    for kv_first, kv_count, u_first, u_count in rectangles(start, stop, group):
        heads = range(kv_first * group + u_first, (kv_first + kv_count) * group, group)
        for block in offset_blocks([form.offsets[head - start] for head in heads]):
            first, (equals, equal), (offsets, ascending) = block
            yield _HeadBlock(
                offset=form.offsets[heads[first] - start],
                kv_head=kv_first + first,
                head=heads[first],
                equal_offsets=GridAxis(equals, 0, equal * group, equal),
                one_kv_head=GridAxis(u_count, head=1),
                by_offset=GridAxis(offsets, 1, ascending * group, ascending),
            )


def offset_blocks(offsets: Sequence[int]) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
    """Blocks of `offsets` by their first place, with two axes `(size, step)`: along one they are equal, along the other ascend.

        offsets[first + i * equal_step + j * ascending_step] == offsets[first] + j

    >>> list(offset_blocks([0, 1, 2, 0, 1, 2, 0]))
    [(0, (2, 3), (3, 1)), (6, (1, 1), (1, 1))]
    >>> list(offset_blocks([0, 0, 1, 1]))
    [(0, (2, 1), (2, 2))]
    """
    first = 0
    while first < len(offsets):
        ascending, equal = (_as_far_as(offsets, first, step) for step in (1, 0))
        size, step = (ascending, 1) if ascending >= equal else (equal, 0)
        chunks = 1
        while (at := first + chunks * size) + size <= len(offsets) and all(
            offsets[at + i] == offsets[first] + (i if step else chunks) for i in range(size)
        ):
            chunks += 1
        yield (first, (chunks, size), (size, 1)) if step else (first, (size, 1), (chunks, size))
        first += chunks * size


def _as_far_as(offsets: Sequence[int], first: int, step: int) -> int:
    """Count the offsets from `first` on that grow by `step` each."""
    count = 1
    while first + count < len(offsets) and offsets[first + count] == offsets[first] + count * step:
        count += 1
    return count
