"""What several tests of the sdpa backend need: a problem, tensors, and the small problems of a grid."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from helpers.strategies import Heads
from torch import Tensor

from dilkit import Pattern
from dilkit.backends.sdpa.grids.problem_grid import ProblemGrid
from dilkit.device import Device
from dilkit.problem import Problem

LONGNET = Pattern([64, 128, 256], [1, 2, 4])


def problem(device: str = "cpu", dtype: str = "float32", **options: Any) -> Problem:
    """A problem of `LONGNET` on an assumed device; `options` are other fields of `Problem`."""
    sizes = dict(pattern=LONGNET, seq=256, heads=8, head_dim=64)
    return Problem(**{**sizes, **options}, dtype=dtype, device=Device.assume(device))


def tensors(seq: int, heads: Heads, dtype: torch.dtype = torch.float64, batch: int = 1, width: int = 8) -> list[Tensor]:
    """Query, key, value and the gradient of the output."""
    counts = (heads[0], heads[1], heads[1], heads[0])
    return [torch.randn(batch, seq, count, width, dtype=dtype) for count in counts]


def small_problems(grid: ProblemGrid) -> list[tuple[int, int, range]]:
    """`(query head, key/value head, rows)` of every small problem of a grid."""
    found = []
    for index in product(*(range(axis.size) for axis in grid.axes)):
        row, head, kv_head = (
            getattr(grid, field) + sum(i * getattr(axis, field) for i, axis in zip(index, grid.axes, strict=True))
            for field in ("row", "head", "kv_head")
        )
        found.append((head, kv_head, range(row, row + grid.rows * grid.row_step, grid.row_step)))
    return found
