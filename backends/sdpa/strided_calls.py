"""The problems of a pattern in the fewest calls of a kernel that takes `(batch, heads, rows, head_dim)`.

A call takes views; only one whose queries see the later keys takes copies in reverse order, of few problems at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from dilkit.backends.sdpa.grids import GridAxis, ProblemGrid, Queries, form_grids
from dilkit.pattern import Pattern

if TYPE_CHECKING:
    from torch import Tensor

MAX_PROBLEMS_PER_AXIS = 65535
"""The largest batch, and the most heads, that CUDA grids and with them the library kernels take."""
ROWS_REVERSED = 2**16
"""Rows of a tensor, of all its heads, that are copied in reverse order at once, about."""


class TensorStrides(NamedTuple):
    """Strides of a tensor `(batch, seq, heads, ...)`; `kv`: its heads are key/value heads."""

    batch: int
    row: int
    head: int
    kv: bool

    @classmethod
    def of(cls, x: Tensor, kv: bool = False) -> TensorStrides:
        batch, row, head = x.stride()[:3]
        return cls(batch, row, head, kv)


@dataclass(frozen=True)
class StridedCall:
    """One call of a library kernel: problems of a grid as tensors `(batch, heads, rows, head_dim)`.

    `batch_axes` and `head_axes` become the kernel's batch and heads; `start` is where the first problem begins.
    """

    grid: ProblemGrid
    batch_axes: tuple[GridAxis, ...]
    head_axes: tuple[GridAxis, ...]
    start: GridAxis

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """`(batch, heads, rows)` of the kernel's queries and results."""
        return prod(axis.size for axis in self.batch_axes), prod(axis.size for axis in self.head_axes), self.grid.rows

    @property
    def key_shape(self) -> tuple[int, int, int]:
        """`(batch, heads, keys)` of the kernel's keys and values."""
        return (*self.shape[:2], self.grid.keys)

    @cached_property
    def is_causal(self) -> bool:
        """True if the kernel must mask keys after the query; rows are `in_order`."""
        return self.grid.seen != "all"

    @cached_property
    def reverse(self) -> bool:
        return self.grid.seen == "later"

    def in_order(self, x: Tensor) -> Tensor:
        """Reverse rows `(batch, heads, rows, ...)` if queries see later keys: kernels know causality only."""
        return x.flip(2) if self.reverse else x

    def view(self, x: Tensor, kv: bool = False) -> Tensor:
        """View the rows of `x` `(batch, seq, heads, ...)` that the call reads or writes as `(*axes, rows, ...)`.

        `kv`: the heads of `x` are key/value heads, and its rows are the keys of the call.
        """
        strides, grid, axes = TensorStrides.of(x, kv), self.grid, self.batch_axes + self.head_axes
        size = (*(axis.size for axis in axes), grid.keys if kv else grid.rows, *x.shape[3:])
        steps = (*(_stride(axis, strides) for axis in axes), grid.row_step * strides.row, *x.stride()[3:])
        start = _stride(self.start, strides) + (grid.key_shift * strides.row if kv else 0)
        return x.as_strided(size, steps, x.storage_offset() + start)

    def kernel_view(self, x: Tensor, kv: bool = False) -> Tensor:
        """Reshape `view` to `(batch, heads, rows, ...)`. Raises RuntimeError if that is no view."""
        return self.view(x, kv).view(*(self.key_shape if kv else self.shape), *x.shape[3:])


def _stride(axis: GridAxis, strides: TensorStrides) -> int:
    return axis.batch * strides.batch + axis.row * strides.row + (axis.kv_head if strides.kv else axis.head) * strides.head


@lru_cache(maxsize=256)
def strided_calls(
    pattern: Pattern,
    seq: int,
    heads: int,
    kv_heads: int,
    batch: int,
    tensors: tuple[TensorStrides, ...],
    is_causal: bool = False,
    queries: Queries = None,
) -> tuple[StridedCall, ...]:
    """Return the fewest kernel calls that compute all grids, branch by branch, for tensors of these strides.

    Two axes of a grid become a call's batch and heads; adjacent axes that are one stride in every tensor count as one axis. The
    smallest are looped over.
    """
    calls: list[StridedCall] = []
    for grids in form_grids(pattern, seq, heads, kv_heads, is_causal, queries):
        for grid in grids:
            axes = ((GridAxis(batch, batch=1),) if batch > 1 else ()) + grid.axes
            origin = GridAxis(1, grid.row, grid.head, grid.kv_head)
            for start, part in _within_limits(origin, axes, _most_problems(grid, axes)):
                calls += _calls_of_grid(grid, start, part, tensors)
    return tuple(calls)


def _most_problems(grid: ProblemGrid, axes: tuple[GridAxis, ...]) -> tuple[int, ...]:
    """Return the most problems of a call along each axis; where rows are copied, few along the longest one."""
    sizes = [axis.size for axis in axes]
    limits = [MAX_PROBLEMS_PER_AXIS] * len(axes)
    if grid.seen == "later" and sizes:
        longest = sizes.index(max(sizes))
        others = prod(sizes) // sizes[longest]
        limits[longest] = min(limits[longest], max(1, ROWS_REVERSED // (others * grid.rows)))
    return tuple(limits)


def _within_limits(
    start: GridAxis, axes: tuple[GridAxis, ...], limits: tuple[int, ...]
) -> Iterator[tuple[GridAxis, tuple[GridAxis, ...]]]:
    for first in product(*(range(0, axis.size, limit) for axis, limit in zip(axes, limits, strict=True))):
        sizes = (min(limit, axis.size - i) for axis, i, limit in zip(axes, first, limits, strict=True))
        yield _after_steps(start, axes, first), tuple(a._replace(size=size) for a, size in zip(axes, sizes, strict=True))


def _calls_of_grid(
    grid: ProblemGrid, start: GridAxis, axes: tuple[GridAxis, ...], tensors: tuple[TensorStrides, ...]
) -> Iterator[StridedCall]:
    runs = _merge_axes(axes, tensors)
    largest = sorted(range(len(runs)), key=lambda i: -prod(a.size for a in runs[i]))[:2]
    chosen = [runs[i] for i in sorted(largest)]
    looped = tuple(axis for i, run in enumerate(runs) if i not in largest for axis in run)
    if len(chosen) < 2:
        # Kernels write their results as (batch, rows, heads, head_dim): with these axes that is the order of the sequence.
        moves_rows = bool(chosen) and (chosen[0][0].row or chosen[0][0].batch)
        chosen = [*chosen, (), ()] if moves_rows else [(), *chosen, ()]
    for index in product(*(range(axis.size) for axis in looped)):
        yield StridedCall(grid, chosen[0], chosen[1], _after_steps(start, looped, index))


def _after_steps(start: GridAxis, axes: tuple[GridAxis, ...], index: tuple[int, ...]) -> GridAxis:
    steps = list(zip(axes, index, strict=True))
    return GridAxis(1, *(getattr(start, f) + sum(i * getattr(a, f) for a, i in steps) for f in GridAxis._fields[1:]))


def _merge_axes(axes: tuple[GridAxis, ...], tensors: tuple[TensorStrides, ...]) -> list[tuple[GridAxis, ...]]:
    runs: list[tuple[GridAxis, ...]] = []
    for axis in axes:
        run = runs[-1] if runs else ()
        fits = prod(a.size for a in run) * axis.size <= MAX_PROBLEMS_PER_AXIS
        if run and fits and all(_stride(run[-1], t) == axis.size * _stride(axis, t) for t in tensors):
            runs[-1] = (*run, axis)
        else:
            runs.append((axis,))
    return runs
