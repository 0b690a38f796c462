"""The block layout of a call as tables of the kernel: the columns that blocks of rows see, and the same with keys as rows.

    bools     where a row of blocks changes, a run begins or ends
    numbers   pairs of blocks, sorted by row; those that follow one another are a run

There is a pair of tables for each matrix of blocks. Nothing is kept: each call may have another layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Int64Array = NDArray[np.int64]


class GivenTables(NamedTuple):
    """Tables as kernels/native.h has them, int64 and contiguous; `batches` and `heads` of the layout, each perhaps 1."""

    table: Int64Array
    rows_end: Int64Array
    first_columns: Int64Array
    columns: Int64Array
    batches: int
    heads: int


def given_tables(layout: Tensor, block: int) -> GivenTables:
    """Those of a layout on the CPU, as `dilkit.op.block_layout` has it, with blocks of `block` tokens."""
    import torch

    batches, heads, blocks, _ = layout.shape
    counts, runs = _of_bools(layout) if layout.dtype is torch.bool else _of_numbers(layout)
    tables = 2 * batches * heads
    return GivenTables(
        (torch.arange(tables + 1) * blocks).numpy(),
        (torch.arange(1, blocks + 1) * block).repeat(tables).numpy(),
        torch.cat((counts.new_zeros(1), counts.cumsum(0))).numpy(),
        (runs * block).contiguous().numpy(),
        batches,
        heads,
    )


def _of_bools(layout: Tensor) -> tuple[Tensor, Tensor]:
    """How many runs of columns each row of each table has, and all runs `(n, 2)`, in blocks."""
    import torch
    from torch.nn import functional as F

    rows = torch.stack((layout, layout.mT), 2).flatten(0, 3)
    steps = F.pad(rows.to(torch.int8), (1, 1)).diff(dim=1)
    begins = steps == 1
    return begins.sum(1), torch.stack((begins.nonzero()[:, 1], (steps == -1).nonzero()[:, 1]), 1)


def _of_numbers(layout: Tensor) -> tuple[Tensor, Tensor]:
    """`_of_bools` of the numbers of the blocks that are seen."""
    import torch

    batches, heads, blocks, _ = layout.shape
    table, row = torch.arange(batches * heads).view(batches, heads, 1, 1), torch.arange(blocks)[:, None]
    seen, column = layout >= 0, layout.long()
    width = blocks + 1  # of a row among all: the last column is seen by none, so that no run goes on into the next row
    by_query, by_key = ((2 * table * blocks + row) * width + column, ((2 * table + 1) * blocks + column) * width + row)
    pairs = torch.cat((by_query[seen], by_key[seen])).sort().values
    apart = pairs.diff() != 1
    one = apart.new_ones(min(len(pairs), 1))
    first, last = pairs[torch.cat((one, apart))], pairs[torch.cat((apart, one))] + 1
    counts = torch.bincount(first // width, minlength=2 * batches * heads * blocks)
    return counts, torch.stack((first % width, last % width), 1)
