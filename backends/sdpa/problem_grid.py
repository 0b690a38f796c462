"""A branch as grids of equal small attention problems, each a strided view of the sequence.

    row(i, t) = row + sum_a i_a * axes[a].row + t * row_step,   t = 0 .. rows - 1
    head(i)   = head + sum_a i_a * axes[a].head                 (kv_head alike)

An index `i` over the axes names one small problem: its queries and its keys are the rows `row(i, 0..rows-1)` of one query
head and one key/value head. The dilation rate is the row step; segments and offsets are axes. So `as_strided` views feed library
kernels without gather copies. A short last segment, or heads that do not fill a period of offsets, make a few more grids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from dilkit.pattern import DilatedSegment, Pattern


class GridAxis(NamedTuple):
    """`size` problems side by side, and how far one step moves in rows, query heads, key/value heads and batch elements."""

    size: int
    row: int = 0
    head: int = 0
    kv_head: int = 0
    batch: int = 0


@dataclass(frozen=True)
class ProblemGrid:
    """Equal small problems of `rows` rows, `row_step` apart; `row`, `head`, `kv_head` are where the first problem begins."""

    rows: int
    row_step: int
    row: int
    head: int
    kv_head: int
    axes: tuple[GridAxis, ...]

    @property
    def problems(self) -> int:
        """The number of small problems."""
        return prod(axis.size for axis in self.axes)


class _HeadBlock(NamedTuple):
    """Heads whose offsets are evenly spaced: where they begin, and the three axes that they make."""

    offset: int
    kv_head: int
    head: int
    equal_offsets: GridAxis
    one_kv_head: GridAxis
    by_offset: GridAxis
    """Heads of consecutive offsets; its row step is 1."""


@lru_cache(maxsize=256)
def branch_grids(pattern: Pattern, seq: int, heads: int, kv_heads: int) -> tuple[tuple[ProblemGrid, ...], ...]:
    """The grids of every branch: each query head and row that a branch keeps is in exactly one problem of one grid.

    Raises TypeError for a kind of branch other than dilated segments.
    """
    found = []
    for branch in pattern.branches:
        if not isinstance(branch, DilatedSegment):
            raise TypeError(f"branch {branch!r} is of kind {branch.kind!r}; backend sdpa computes {DilatedSegment.kind!r} only")
        found.append(tuple(_segment_grids(pattern, branch, seq, heads, kv_heads)))
    return tuple(found)


def _segment_grids(pattern: Pattern, branch: DilatedSegment, seq: int, heads: int, kv_heads: int) -> Iterator[ProblemGrid]:
    length, rate = min(branch.segment_length, seq), branch.dilation_rate
    count, tail = divmod(seq, length)
    spans = [(0, GridAxis(count, row=length), length)]
    if tail:
        spans.append((count * length, GridAxis(1), tail))
    for block in _head_blocks(pattern, branch, heads, kv_heads):
        for start, segments, span in spans:
            for skip, offsets, rows in _offset_runs(block.offset, block.by_offset.size, span, rate):
                axes = (segments, block.equal_offsets, block.by_offset._replace(size=offsets), block.one_kv_head)
                yield ProblemGrid(
                    rows=rows,
                    row_step=min(rate, seq),  # a step beyond the sequence is never made, and 2**62 is no stride
                    row=start + block.offset + skip,
                    head=block.head + skip * block.by_offset.head,
                    kv_head=block.kv_head + skip * block.by_offset.kv_head,
                    axes=tuple(axis for axis in axes if axis.size > 1),
                )


def _head_blocks(pattern: Pattern, branch: DilatedSegment, heads: int, kv_heads: int) -> Iterator[_HeadBlock]:
    group, rate = heads // kv_heads, branch.dilation_rate
    before, total = pattern.head_shard or (0, kv_heads)
    modulo = pattern.offset == "modulo"
    period = rate if modulo else -(-total // rate)
    for kv_first, kv_count, u_first, u_count in rectangles(*(branch.heads or (0, heads)), group):
        for outer, outers, inner, inners in rectangles(before + kv_first, before + kv_first + kv_count, period):
            kv_head = outer * period + inner - before
            periods, singles = GridAxis(outers, 0, period * group, period), GridAxis(inners, 0, group, 1)
            offset, by_offset, equal = (inner, singles, periods) if modulo else (outer, periods, singles)
            yield _HeadBlock(
                offset=offset,
                kv_head=kv_head,
                head=kv_head * group + u_first,
                equal_offsets=equal,
                one_kv_head=GridAxis(u_count, head=1),
                by_offset=by_offset._replace(row=1),
            )


def rectangles(start: int, stop: int, period: int) -> Iterator[tuple[int, int, int, int]]:
    """`start .. stop - 1` written as `outer * period + inner`: up to three blocks (outer, outers, inner, inners)."""
    outer, inner = divmod(start, period)
    if inner and start < stop:
        end = min(stop, (outer + 1) * period)
        yield outer, 1, inner, end - start
        start = end
    whole, rest = divmod(stop - start, period)
    if whole:
        yield start // period, whole, 0, period
    if rest:
        yield start // period + whole, 1, 0, rest


def _offset_runs(first: int, count: int, span: int, rate: int) -> Iterator[tuple[int, int, int]]:
    """Offsets `first .. first + count - 1` by the rows that they keep of a segment: (offsets skipped, offsets, rows)."""
    rows, longer = divmod(span, rate)
    cut = min(max(longer - first, 0), count)
    if cut:
        yield 0, cut, rows + 1
    if rows and cut < count:
        yield cut, count - cut, rows
