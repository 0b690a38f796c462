"""The segments of a dilated branch as grids of small problems: one for each segment and head, whose rows are queries and keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dilkit.backends.sdpa.grids.problem_grid import GridAxis, ProblemGrid, offset_runs, rectangles
from dilkit.pattern import DilatedSegment, Pattern


class _HeadBlock(NamedTuple):
    """Heads whose offsets are evenly spaced: where they begin, and the three axes that they make."""

    offset: int
    kv_head: int
    head: int
    equal_offsets: GridAxis
    one_kv_head: GridAxis
    by_offset: GridAxis
    """Heads of consecutive offsets; its row step is 1."""


def segment_grids(
    pattern: Pattern, branch: DilatedSegment, seq: int, heads: int, kv_heads: int, is_causal: bool
) -> Iterator[ProblemGrid]:
    """The segments of a branch: each query head and row that it keeps is in exactly one problem."""
    length, rate = min(branch.segment_length, seq), branch.dilation_rate
    count, tail = divmod(seq, length)
    spans = [(0, GridAxis(count, row=length), length)]
    if tail:
        spans.append((count * length, GridAxis(1), tail))
    for block in _head_blocks(pattern, branch, heads, kv_heads):
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
