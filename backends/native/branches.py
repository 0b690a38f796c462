"""The branches of a pattern as the C kernel reads them: arrays of numbers. kernels/native.h says what they mean.

DilatedSegment               SEGMENTS   length, rate, an offset for each head
SlidingWindow, Strided       BAND       length and rate; a stride is a band without end
GlobalTokens, BlockSparse    RUNS       runs of rows, each with the runs of columns that it sees: queries as rows, then keys
Neighborhood                 GRID       sizes, kernel sizes and dilations of three dimensions; length of the last
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from dilkit.backends import once
from dilkit.backends.runs import UNBOUNDED, runs_of, union
from dilkit.pattern import BlockSparse, Branch, DilatedSegment, GlobalTokens, Neighborhood, SlidingWindow, Strided
from dilkit.problem import Problem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]

SEGMENTS, BAND, RUNS, GRID = range(4)

MOST_WINDOW = 2**24 - 2**16
"""The kernel compares positions as fp32 numbers, counted from the start of a block of rows: they are exact up to 2**24."""

BRANCH_KINDS = frozenset(cls.kind for cls in (DilatedSegment, SlidingWindow, Strided, GlobalTokens, BlockSparse, Neighborhood))


class RunTable(NamedTuple):
    """Runs of consecutive rows, ascending and complete, and the runs of columns that each of them sees.

    Run r of the rows ends before `stop[r]`; its runs of columns, as many as `runs[r]`, are the next ones of `columns`
    `(all runs, 2)`: start and stop.
    """

    stop: Int64Array
    runs: Int64Array
    columns: Int64Array


class BranchArrays(NamedTuple):
    """int64, contiguous: `kind`, `length`, `rate` `(branches,)`, `grid` 9 each; `offset`, ... `(heads, branches)`; tables."""

    kind: Int64Array
    length: Int64Array
    rate: Int64Array
    grid: Int64Array
    offset: Int64Array
    without: Int64Array
    beyond: Int64Array
    table: Int64Array
    rows_end: Int64Array
    first_columns: Int64Array
    columns: Int64Array


def branch_arrays(problem: Problem) -> BranchArrays:
    """The arrays of the branches of `problem.pattern`, with an offset or a table for each query head."""
    import numpy as np

    branches, tables = problem.pattern.branches, list[RunTable]()
    kind, length, rate = (np.array(values, np.int64) for values in zip(*map(_kind_length_rate, branches), strict=True))
    grid = np.array([_grid(branch) for branch in branches], np.int64).reshape(-1)
    offset = np.array([_offsets(branch, problem, tables) for branch in branches], np.int64)
    without, beyond = _left_out(problem, tables)
    offset[beyond >= length[:, None]] = -1  # another band shows all of it
    offset, without, beyond = (np.ascontiguousarray(x.T) for x in (offset, without, beyond))
    of_branches = kind, length, rate, grid, offset, without, beyond
    if not tables:
        none = np.empty(0, np.int64)
        return BranchArrays(*of_branches, none, none, none, none)
    stops, counts, columns = (np.concatenate(arrays) for arrays in zip(*tables, strict=True))
    first = np.cumsum([0, *(len(table.stop) for table in tables)], dtype=np.int64)
    ends = np.concatenate(([0], np.cumsum(counts)))
    return BranchArrays(*of_branches, first, stops, ends, columns.reshape(-1))


def widest_window(problem: Problem) -> int:
    """The widest window that does not reach over the whole sequence; 0 if there is none."""
    windows = [branch.window for branch in problem.pattern.branches if isinstance(branch, SlidingWindow)]
    return max((window for window in windows if problem.varlen or window < problem.seq), default=0)


def _kind_length_rate(branch: Branch) -> tuple[int, int, int]:
    if isinstance(branch, DilatedSegment):
        return SEGMENTS, min(branch.segment_length, UNBOUNDED), min(branch.dilation_rate, UNBOUNDED)
    if isinstance(branch, SlidingWindow):
        return BAND, min(branch.window, UNBOUNDED), min(branch.dilation_rate, UNBOUNDED)
    if isinstance(branch, Strided):
        return BAND, UNBOUNDED, min(branch.stride, UNBOUNDED)
    if isinstance(branch, Neighborhood):
        return GRID, min(branch.shape[-1], UNBOUNDED), 1
    return RUNS, branch.block_size if isinstance(branch, BlockSparse) else UNBOUNDED, 1


def _grid(branch: Branch) -> list[int]:
    """Sizes, kernel sizes and dilations of three dimensions; those that a grid has not are the first ones, of size 1."""
    given = (branch.shape, branch.kernel_size, branch.dilation) if isinstance(branch, Neighborhood) else ((), (), ())
    return [min(size, UNBOUNDED) for sizes in given for size in (*(1,) * (3 - len(sizes)), *sizes)]


def _offsets(branch: Branch, problem: Problem, tables: list[RunTable]) -> list[int]:
    """For each query head its offset, or the number of its pair of tables; -1 where the branch does not serve it."""
    pattern, heads, kv_heads = problem.pattern, range(problem.heads), problem.kv_heads
    found = [0] * problem.heads
    if isinstance(branch, DilatedSegment):
        rate = branch.dilation_rate
        found = [pattern.head_offset(rate, head * kv_heads // problem.heads, kv_heads) for head in heads]
    elif isinstance(branch, GlobalTokens):
        found = [len(tables) // 2] * problem.heads
        tables += _global_tables(branch)
    elif isinstance(branch, BlockSparse):
        first, several = len(tables) // 2, branch.layout.heads > 1
        found = [first + head * several for head in heads]
        chosen = range(problem.first_head, problem.first_head + problem.heads) if several else (0,)
        for head in chosen:
            tables += _block_tables(branch, head)
    return [offset if branch.serves(head) else -1 for head, offset in zip(heads, found, strict=True)]


def _left_out(problem: Problem, tables: list[RunTable]) -> tuple[Int64Array, Int64Array]:
    """What each branch leaves out for each query head so that pairs count once: the number of two tables, and a distance."""
    import numpy as np

    branches = problem.pattern.branches
    without, beyond = np.full((len(branches), problem.heads), -1), np.zeros((len(branches), problem.heads), np.int64)
    if problem.pattern.overlap == "count" or problem.pattern.only_segments:
        return without, beyond
    known: dict[tuple[GlobalTokens, ...], int] = {(): -1}
    for at, head in product(range(len(branches)), range(problem.heads)):
        left_out = once.globals_before(branches, at, head)
        if left_out not in known:
            known[left_out] = len(tables) // 2
            tables += _tables_of(left_out)
        without[at, head], beyond[at, head] = known[left_out], once.beyond(branches, at, head)
    return without, beyond


def _block_tables(branch: BlockSparse, head: int) -> tuple[RunTable, RunTable]:
    """Blocks of queries as rows, and blocks of keys."""
    layout = branch.layout.array()[head]
    return _block_table(layout, branch.block_size), _block_table(layout.T, branch.block_size)


def _block_table(layout: NDArray[np.bool_], block_size: int) -> RunTable:
    """The rows block by block; blocks of columns that are seen one after the other are one run."""
    import numpy as np

    steps = np.diff(np.pad(layout, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    rows, starts = np.nonzero(steps == 1)
    columns = np.stack((starts, np.nonzero(steps == -1)[1]), axis=1) * block_size
    stop = np.arange(1, len(layout) + 1, dtype=np.int64) * block_size
    return RunTable(stop, np.bincount(rows, minlength=len(layout)).astype(np.int64), columns.astype(np.int64))


def _global_tables(branch: GlobalTokens) -> tuple[RunTable, RunTable]:
    """Queries as rows, and keys as rows: those that are global see, or are seen by, all."""
    import numpy as np

    tokens = runs_of(branch)
    everything, nothing = np.array([[0, UNBOUNDED]]), np.empty((0, 2), np.int64)
    if branch.direction == "both":
        both = _global_table(tokens, everything, tokens)
        return both, both
    return RunTable(np.array([UNBOUNDED]), np.array([len(tokens)]), tokens), _global_table(tokens, everything, nothing)


def _global_table(runs: Int64Array, inside: Int64Array, outside: Int64Array) -> RunTable:
    """Rows in `runs` see the columns `inside`, the others `outside`."""
    import numpy as np

    # Before each run of global rows is one of others, and one after the last; the first is empty where row 0 is global.
    stop = np.append(runs.reshape(-1), UNBOUNDED)
    seen = [outside, inside] * len(runs) + [outside]
    return RunTable(stop, np.array([len(columns) for columns in seen]), np.concatenate(seen))


def _tables_of(left_out: tuple[GlobalTokens, ...]) -> tuple[RunTable, RunTable]:
    """The queries that see all by these branches, and the keys that are seen by all: rows that see something in a table."""
    import numpy as np

    queries = [runs_of(branch) for branch in left_out if branch.direction == "both"]
    keys = [runs_of(branch) for branch in left_out]
    nothing, something = np.empty((0, 2), np.int64), np.array([[0, UNBOUNDED]])
    all_queries, all_keys = union(*queries), union(*keys)
    return _global_table(all_queries, something, nothing), _global_table(all_keys, something, nothing)
