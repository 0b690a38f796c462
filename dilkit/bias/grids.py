"""Cells of grids, and the entries that tables have for their offsets."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dilkit.checks import check_type, integer


def grid_shape(shape: Any) -> tuple[int, ...]:
    check_type("shape", shape, (tuple, list), "a sequence of sizes is needed")
    return tuple(integer("shape", size, at_least=1) for size in shape)


def check_cells(shape: tuple[int, ...], seq: int) -> None:
    if seq > (tokens := math.prod(shape)):
        raise ValueError(f"shape={shape} of the bias is a grid of {tokens} tokens; at least the {seq} of query are needed")


def axis_sizes(sizes: Any, dims: int, columns: int, what: str) -> tuple[int, ...]:
    """Return the sizes of a table for each of `dims` axes. Raises TypeError or ValueError unless odd ones add up to `columns`."""
    check_type("sizes", sizes, (tuple, list), "a sequence of sizes is needed")
    checked_sizes = tuple(integer("sizes", size, at_least=1) for size in sizes)
    if not 1 <= len(checked_sizes) == dims <= 3 or sum(checked_sizes) != columns or any(size % 2 == 0 for size in checked_sizes):
        needed = f"an odd size for each of {dims} axes, 1 to 3, of {columns} {what} in all, is needed"
        raise ValueError(f"sizes={checked_sizes}; {needed}")
    return checked_sizes


def cells_of(rows: Tensor, shape: tuple[int, ...], steps: tuple[int, ...] = (1, 1, 1)) -> Tensor:
    """Return the coordinates `(..., dims)` of rows of a row-major grid, in steps of so many cells."""
    columns, left = [], rows
    for size, step in zip(shape[:0:-1], steps[len(shape) - 1 : 0 : -1], strict=True):
        columns.append(left % size // step)
        left = left // size
    return torch.stack([left // steps[0], *columns[::-1]], -1)


def entry_of(sizes: tuple[int, ...], apart: Tensor) -> Tensor:
    """Return the entry of a flattened table of these sizes for offsets `(..., dims)`, each clipped."""
    entry = torch.zeros_like(apart[..., 0])
    for k, size in enumerate(sizes):
        entry = entry * size + apart[..., k].clamp(-(size // 2), size // 2) + size // 2
    return entry
