"""Tables of runs of what a call gives, for the branch of the kernel that has none: made in the call, for one of its phases.

FORWARD reads the columns of queries, BACKWARD those of keys; the tables of the other side are empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dilkit.inputs import Inputs
from dilkit.pattern.lowering import GivenBlocks
from dilkit.pattern.lowering.tables import turned
from dilkit.problem import Problem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]

ROWS_TOGETHER = 16
"""So many rows, or more, that see the same are one run: of fewer, the kernel takes rows in order together."""


class GivenTables(NamedTuple):
    """Tables as kernels/native.h has them, int64 and contiguous; `batches` and `heads` of what is given, each perhaps 1."""

    table: Int64Array
    rows_end: Int64Array
    first_columns: Int64Array
    columns: Int64Array
    batches: int
    heads: int


class _Runs(NamedTuple):
    """Runs of rows of all tables in turn: where each ends, and the runs of columns `(n, 2)` that it sees."""

    rows_end: Tensor
    counts: Tensor
    columns: Tensor
    of_table: Tensor


def given_tables(inputs: Inputs, problem: Problem, by_key: bool) -> GivenTables:
    """Return the tables of a call for a phase; `by_key`: BACKWARD."""
    given: Any = inputs.given
    batches, heads = given.shape[:2]
    if inputs.intervals is not None:
        runs = _of_intervals(inputs.intervals)
        runs = _turned(runs, problem.seq) if by_key else runs
    else:
        (block,) = {form.block for form in problem.forms if isinstance(form, GivenBlocks)}
        runs = _of_blocks(given, block, by_key)
    nothing = torch.zeros_like(runs.of_table)
    sides = (nothing, runs.of_table) if by_key else (runs.of_table, nothing)
    arrays = _starts(torch.stack(sides, 1).flatten()), runs.rows_end, _starts(runs.counts), runs.columns
    table, rows_end, first_columns, columns = (x.contiguous().numpy() for x in arrays)
    return GivenTables(table, rows_end, first_columns, columns, batches, heads)


def _starts(counts: Tensor) -> Tensor:
    return torch.cat((counts.new_zeros(1), counts.cumsum(0)))


def _of_blocks(layout: Tensor, block: int, by_key: bool) -> _Runs:
    batches, heads, blocks, _ = layout.shape
    if layout.dtype is torch.bool:
        rows = (layout.mT if by_key else layout).flatten(0, 2)
        steps = F.pad(rows.to(torch.int8), (1, 1)).diff(dim=1)
        begins = steps == 1
        counts, columns = begins.sum(1), torch.stack((begins.nonzero()[:, 1], (steps == -1).nonzero()[:, 1]), 1)
    else:
        counts, columns = _of_numbers(layout, by_key)
    tables = batches * heads
    ends = (torch.arange(1, blocks + 1) * block).repeat(tables)
    return _Runs(ends, counts, columns * block, torch.full((tables,), blocks))


def _of_numbers(layout: Tensor, by_key: bool) -> tuple[Tensor, Tensor]:
    """Count the runs of columns of each row of each table; return the counts and all runs `(n, 2)`, in blocks."""
    batches, heads, blocks, _ = layout.shape
    table, row = torch.arange(batches * heads).view(batches, heads, 1, 1), torch.arange(blocks)[:, None]
    seen, column = layout >= 0, layout.long()
    width = blocks + 1  # of a row among all: the last column is seen by none, so that no run goes on into the next row
    places = table * blocks + column, row
    if not by_key:
        places = table * blocks + row, column
    pairs = (places[0] * width + places[1])[seen].sort().values
    apart = pairs.diff() != 1
    one = apart.new_ones(min(len(pairs), 1))
    first, last = pairs[torch.cat((one, apart))], pairs[torch.cat((apart, one))] + 1
    counts = torch.bincount(first // width, minlength=batches * heads * blocks)
    return counts, torch.stack((first % width, last % width), 1)


def _of_intervals(intervals: Tensor) -> _Runs:
    """Return the runs of queries, and the columns of each."""
    bounds = intervals.flatten(0, 1)  # (tables, seq, most, 2)
    seen = bounds[..., 0] < bounds[..., 1]
    bounds = bounds.where(seen[..., None], 0)
    differs = F.pad((bounds[:, 1:] != bounds[:, :-1]).flatten(2).any(2), (1, 0), value=True)
    first, ends, of_table = _joined(differs)
    shown = seen.flatten(0, 1)[first]
    return _Runs(ends, shown.sum(1), bounds.flatten(0, 1)[first][shown].long(), of_table)


def _turned(runs: _Runs, seq: int) -> _Runs:
    """Return the runs of keys, and the runs of queries that see each."""
    tables, count = len(runs.of_table), len(runs.rows_end)
    table = torch.arange(tables).repeat_interleave(runs.of_table)  # of each run of queries
    row, first_key = (torch.arange(count).repeat_interleave(runs.counts), (table * seq).repeat_interleave(runs.counts))
    by_query = torch.stack((row, *(runs.columns + first_key[:, None]).unbind(1)), 1)
    key, first, last = torch.from_numpy(turned(by_query.numpy())).unbind(1)
    starts = F.pad(runs.rows_end, (1, 0))[:-1]
    starts[_starts(runs.of_table)[:-1]] = 0
    columns = torch.stack((starts[first], runs.rows_end[last - 1]), 1)
    counts = torch.bincount(key, minlength=tables * seq)
    before = torch.arange(len(key)) - F.pad(counts, (1, 0))[key]  # the same column's place in the key before
    unlike = (columns != columns[before.clamp(min=0)]).any(1)
    differs = torch.bincount(key[unlike], minlength=tables * seq) > 0
    differs |= counts != F.pad(counts, (1, 0))[:-1]
    differs = differs.view(tables, seq)
    differs[:, 0] = True
    first_keys, ends, of_table = _joined(differs)
    chosen = differs.new_zeros(tables * seq).index_fill_(0, first_keys, True)
    return _Runs(ends, counts[first_keys], columns[chosen[key]], of_table)


def _joined(differs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Join rows `(tables, seq)` that see what the one before them sees, where `ROWS_TOGETHER` or more do.

    Returns the first row of each run among those of all tables, where each run ends in its table, and the runs of each table.
    """
    tables, seq = differs.shape
    starts = F.pad(differs.flatten().nonzero()[:, 0], (0, 1), value=tables * seq)
    lengths = starts.diff()
    first = (differs.flatten() | (lengths < ROWS_TOGETHER).repeat_interleave(lengths)).nonzero()[:, 0]
    ends = (F.pad(first, (0, 1), value=tables * seq)[1:] - 1) % seq + 1
    return first, ends, torch.bincount(first // seq, minlength=tables)
