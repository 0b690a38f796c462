"""Pieces: a branch as blocks of equal small attention problems, each a strided view of the sequence.

    row(i, t) = row + sum_a i_a * axes[a].row + t * row_step,   t = 0 .. rows - 1
    head(i)   = head + sum_a i_a * axes[a].head                 (kv_head alike)

An index `i` over the axes names one small problem: its queries and its keys are the rows `row(i, 0..rows-1)` of one query
head and one key/value head. Dilation is a row step, a segment or an offset an axis, so that `as_strided` views feed library
kernels with no gather copies. Ragged tails and odd head counts are a few more pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from dilkit.pattern import DilatedSegment, Pattern


class Axis(NamedTuple):
    """`size` problems side by side: how far one step moves in batch, rows, query heads and key/value heads."""

    size: int
    row: int = 0
    head: int = 0
    kv_head: int = 0
    batch: int = 0


@dataclass(frozen=True)
class Piece:
    """Equal small problems on a grid: `rows` rows each, `row_step` apart; `row`, `head`, `kv_head` are where the first begins."""

    rows: int
    row_step: int
    row: int
    head: int
    kv_head: int
    axes: tuple[Axis, ...]

    @property
    def problems(self) -> int:
        """How many small problems there are."""
        return prod(axis.size for axis in self.axes)


@lru_cache(maxsize=256)
def branch_pieces(pattern: Pattern, seq: int, heads: int, kv_heads: int) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of every branch: each query head and row that a branch keeps is in exactly one problem of one piece.

    Raises TypeError for a kind of branch that is not known here.
    """
    found = []
    for branch in pattern.branches:
        if not isinstance(branch, DilatedSegment):
            raise TypeError(f"branch {branch!r} is of kind {branch.kind!r}; pieces are known for {DilatedSegment.kind!r} only")
        found.append(tuple(_segment_pieces(pattern, branch, seq, heads, kv_heads)))
    return tuple(found)


def _segment_pieces(pattern: Pattern, branch: DilatedSegment, seq: int, heads: int, kv_heads: int) -> Iterator[Piece]:
    length, rate = min(branch.segment_length, seq), branch.dilation_rate
    count, tail = divmod(seq, length)
    spans = [(0, Axis(count, row=length), length)]
    if tail:
        spans.append((count * length, Axis(1), tail))
    for first, kv_head, head, among, within, by_offset in _head_blocks(pattern, branch, heads, kv_heads):
        for start, segments, span in spans:
            for skip, offsets, rows in _offset_runs(first, by_offset.size, span, rate):
                axes = (segments, among, by_offset._replace(size=offsets), within)
                yield Piece(
                    rows=rows,
                    row_step=min(rate, seq),  # beyond the sequence it is never taken, and 2**62 is no stride
                    row=start + first + skip,
                    head=head + skip * by_offset.head,
                    kv_head=kv_head + skip * by_offset.kv_head,
                    axes=tuple(axis for axis in axes if axis.size > 1),
                )


def _head_blocks(
    pattern: Pattern, branch: DilatedSegment, heads: int, kv_heads: int
) -> Iterator[tuple[int, int, int, Axis, Axis, Axis]]:
    """Blocks of heads, as (first offset, first key/value head, first query head, three axes).

    The axes: heads of equal offset, query heads of one key/value head, heads of consecutive offsets (their row step is 1).
    """
    group, rate = heads // kv_heads, branch.dilation_rate
    before, total = pattern.head_shard or (0, kv_heads)
    modulo = pattern.offset == "modulo"
    period = rate if modulo else -(-total // rate)
    for kv_first, kv_count, u_first, u_count in _rectangles(*(branch.heads or (0, heads)), group):
        for outer, outers, inner, inners in _rectangles(before + kv_first, before + kv_first + kv_count, period):
            kv_head = outer * period + inner - before
            periods, singles = Axis(outers, 0, period * group, period), Axis(inners, 0, group, 1)
            first, by_offset, among = (inner, singles, periods) if modulo else (outer, periods, singles)
            yield first, kv_head, kv_head * group + u_first, among, Axis(u_count, head=1), by_offset._replace(row=1)


def _rectangles(start: int, stop: int, period: int) -> Iterator[tuple[int, int, int, int]]:
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
