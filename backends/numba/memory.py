"""Shared memory of a block, for every kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda
from numpy import float32, int32

from dilkit.backends.numba.arguments import Tiling
from dilkit.backends.numba.compiling import ALIGN, device
from dilkit.backends.numba.tiles import Columns
from dilkit.backends.numba.visible import MAX_RUNS, VisibleRuns
from dilkit.backends.tiles.schedule import MAX_BRANCHES


class BlockMemory(NamedTuple):
    """`rows`: positions of the tile's rows (-1: none). `visible`: all that they see. `columns`: a window of that, one position a
    thread. `stream`: the numbers of so many columns as a score tile has. `weights`: of a score tile, to multiply `stream` by."""

    rows: Any
    visible: VisibleRuns
    columns: Columns
    stream: Any
    weights: Any


def block_memory(tiling: Tiling) -> Callable[..., Any]:
    """A device function that returns the `BlockMemory` of its block."""
    ROWS, WINDOW, STREAM, WEIGHTS = tiling.rows, tiling.threads, tiling.column_tile, tiling.weight_tile

    def allocate():
        rows = cuda.shared.array(ROWS, int32)
        runs = cuda.shared.array((MAX_RUNS, 4), int32)
        segments = cuda.shared.array((MAX_BRANCHES, 3), int32)
        sizes = cuda.shared.array(2, int32)
        positions = cuda.shared.array(WINDOW, int32)
        biases = cuda.shared.array(WINDOW, float32)
        deltas = cuda.shared.array(WINDOW, float32)
        stream = cuda.shared.array(STREAM, float32, ALIGN)
        weights = cuda.shared.array(WEIGHTS, float32, ALIGN)
        return BlockMemory(rows, VisibleRuns(runs, segments, sizes), Columns(positions, biases, deltas), stream, weights)

    return device(allocate)
