"""A grid of equal small attention problems, each a strided view of the sequence.

    query t of problem i:  row(i) + t * row_step,                t = 0 .. rows - 1
    key u of problem i:    row(i) + key_shift + u * row_step,    u = 0 .. keys - 1
    row(i)  = row + sum_a i_a * axes[a].row                      head(i) = head + sum_a i_a * axes[a].head     (kv_head alike)

An index `i` over the axes names one small problem, of one query head and one key/value head. The dilation rate is the row step;
segments, blocks of a window and offsets are axes. So `as_strided` views feed library kernels without gather copies. A query sees

    all      every key                    [####]
    earlier  the keys u <= t              [#   ]  as many keys as queries: what kernels call causal
                                          [####]
    later    the keys u >= t              [####]  the same with queries and keys in reverse order
                                          [   #]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

Seen = Literal["all", "earlier", "later"]


class GridAxis(NamedTuple):
    """`size` problems side by side, and how far one step moves in rows, query heads, key/value heads and batch elements."""

    size: int
    row: int = 0
    head: int = 0
    kv_head: int = 0
    batch: int = 0


@dataclass(frozen=True)
class ProblemGrid:
    """Equal small problems of `rows` queries and `keys` keys; `row`, `head`, `kv_head` are where the first problem begins."""

    rows: int
    row_step: int
    row: int
    head: int
    kv_head: int
    axes: tuple[GridAxis, ...]
    keys: int
    key_shift: int = 0
    seen: Seen = "all"

    @property
    def problems(self) -> int:
        """The number of small problems."""
        return prod(axis.size for axis in self.axes)

    @property
    def pairs(self) -> int:
        """The pairs that are seen, in all problems."""
        return self.problems * (self.rows * self.keys if self.seen == "all" else self.rows * (self.rows + 1) // 2)


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


def offset_runs(first: int, count: int, span: int, rate: int) -> Iterator[tuple[int, int, int]]:
    """Offsets `first .. first + count - 1` by the rows that they keep of a segment: (offsets skipped, offsets, rows)."""
    rows, longer = divmod(span, rate)
    cut = min(max(longer - first, 0), count)
    if cut:
        yield 0, cut, rows + 1
    if rows and cut < count:
        yield cut, count - cut, rows
