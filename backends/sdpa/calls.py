"""Calls: the pieces of a pattern as the fewest calls of a kernel that takes `(batch, heads, rows, head_dim)`.

Two axes of a piece's grid become the kernel's batch and heads, the others are looped over. What a call takes are views.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from dilkit.backends.sdpa.pieces import Axis, Piece, branch_pieces
from dilkit.pattern import Pattern

if TYPE_CHECKING:
    from torch import Tensor

MAX_PROBLEMS_PER_AXIS = 65535
"""What CUDA grids, and with them the library kernels, take as batch or as heads."""


class Layout(NamedTuple):
    """How a tensor `(batch, seq, heads, ...)` lies in memory: its strides, and whether it has key/value heads."""

    batch: int
    row: int
    head: int
    kv: bool

    @classmethod
    def of(cls, x: Tensor, kv: bool = False) -> Layout:
        """The layout of `x`."""
        batch, row, head = x.stride()[:3]
        return cls(batch, row, head, kv)


@dataclass(frozen=True)
class Call:
    """One call of a library kernel: problems of a piece laid out as `(batch, heads, rows, head_dim)`."""

    piece: Piece
    batch_axes: tuple[Axis, ...]
    head_axes: tuple[Axis, ...]
    start: Axis

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the grid, those of the batch first."""
        return self.batch_axes + self.head_axes

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return tuple(axis.size for axis in self.axes)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """`(batch, heads, rows)` of the kernel's tensors."""
        return prod(a.size for a in self.batch_axes), prod(a.size for a in self.head_axes), self.piece.rows

    def steps(self, layout: Layout) -> tuple[int, ...]:
        """The strides of a view `(*grid, rows)` of a tensor of this layout."""
        return (*(_stride(axis, layout) for axis in self.axes), self.piece.row_step * layout.row)

    def view(self, x: Tensor, kv: bool = False) -> Tensor:
        """The rows of `x` `(batch, seq, heads, d)` that take part, `(*grid, rows, d)`: a view. `kv`: `x` has key/value heads."""
        layout = Layout.of(x, kv)
        size = (*self.grid, self.piece.rows, x.shape[3])
        return x.as_strided(size, (*self.steps(layout), x.stride(3)), x.storage_offset() + _stride(self.start, layout))

    def kernel_view(self, x: Tensor, kv: bool = False) -> Tensor:
        """`view` as `(batch, heads, rows, d)`; a view too."""
        return self.view(x, kv).view(*self.shape, x.shape[3])


def _stride(axis: Axis, layout: Layout) -> int:
    """How far one step along `axis` moves in memory."""
    return axis.batch * layout.batch + axis.row * layout.row + (axis.kv_head if layout.kv else axis.head) * layout.head


@lru_cache(maxsize=256)
def library_calls(
    pattern: Pattern, seq: int, heads: int, kv_heads: int, batch: int, tensors: tuple[Layout, ...]
) -> tuple[Call, ...]:
    """The fewest kernel calls that compute all pieces, branch after branch, for tensors of these layouts.

    Two axes of a piece become a call's batch and heads; adjacent axes that are one stride in every tensor count as one axis.
    The smallest of the others are looped over.
    """
    found: list[Call] = []
    for pieces in branch_pieces(pattern, seq, heads, kv_heads):
        for piece in pieces:
            axes = ((Axis(batch, batch=1),) if batch > 1 else ()) + piece.axes
            origin = Axis(1, piece.row, piece.head, piece.kv_head)
            for start, part in _within_limits(origin, axes):
                found += _calls(piece, start, part, tensors)
    return tuple(found)


def _within_limits(start: Axis, axes: tuple[Axis, ...]) -> Iterator[tuple[Axis, tuple[Axis, ...]]]:
    """The grid cut into grids of at most `MAX_PROBLEMS_PER_AXIS` an axis."""
    limit = MAX_PROBLEMS_PER_AXIS
    for first in product(*(range(0, axis.size, limit) for axis in axes)):
        sizes = (min(limit, axis.size - i) for axis, i in zip(axes, first, strict=True))
        yield _moved(start, axes, first), tuple(a._replace(size=size) for a, size in zip(axes, sizes, strict=True))


def _calls(piece: Piece, start: Axis, axes: tuple[Axis, ...], tensors: tuple[Layout, ...]) -> Iterator[Call]:
    runs = _merged(axes, tensors)
    largest = sorted(range(len(runs)), key=lambda i: -prod(a.size for a in runs[i]))[:2]
    chosen = [runs[i] for i in sorted(largest)]
    looped = tuple(axis for i, run in enumerate(runs) if i not in largest for axis in run)
    if len(chosen) < 2:
        # Kernels write (batch, rows, heads): so laid out, a result is already in the order of the sequence.
        moves_rows = bool(chosen) and (chosen[0][0].row or chosen[0][0].batch)
        chosen = [*chosen, (), ()] if moves_rows else [(), *chosen, ()]
    for index in product(*(range(axis.size) for axis in looped)):
        yield Call(piece, chosen[0], chosen[1], _moved(start, looped, index))


def _moved(start: Axis, axes: tuple[Axis, ...], index: tuple[int, ...]) -> Axis:
    """`start` after `index[a]` steps along each of `axes`."""
    steps = list(zip(axes, index, strict=True))
    return Axis(1, *(getattr(start, f) + sum(i * getattr(a, f) for a, i in steps) for f in Axis._fields[1:]))


def _merged(axes: tuple[Axis, ...], tensors: tuple[Layout, ...]) -> list[tuple[Axis, ...]]:
    """Runs of adjacent axes that are one stride in every tensor."""
    runs: list[tuple[Axis, ...]] = []
    for axis in axes:
        run = runs[-1] if runs else ()
        fits = prod(a.size for a in run) * axis.size <= MAX_PROBLEMS_PER_AXIS
        if run and fits and all(_stride(run[-1], t) == axis.size * _stride(axis, t) for t in tensors):
            runs[-1] = (*run, axis)
        else:
            runs.append((axis,))
    return runs
