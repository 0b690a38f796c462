"""The branches of a pattern as the C kernel reads them: arrays of numbers. kernels/native.h says what they mean.

DilatedSegment               SEGMENTS   length, rate, an offset for each head
SlidingWindow, Strided       BAND       length and rate; a stride is a band without end
GlobalTokens, BlockSparse    RUNS       runs of rows, each with the runs of columns that it sees: queries as rows, then keys
Neighborhood                 GRID       sizes, kernel sizes and dilations of three dimensions; length of the last
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from dilkit.backends import once
from dilkit.backends.native.tables import RunTable, tables_left_out, tables_of_blocks, tables_of_globals
from dilkit.pattern import BlockSparse, Branch, DilatedSegment, GlobalTokens, Neighborhood, SlidingWindow, Strided
from dilkit.pattern.runs import UNBOUNDED
from dilkit.problem import Problem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]

SEGMENTS, BAND, RUNS, GRID = range(4)

MOST_WINDOW = 2**24 - 2**16
"""The kernel compares positions as fp32 numbers, counted from the start of a block of rows: they are exact up to 2**24."""

MOST_TOKENS = 2**30
"""The kernel compares coordinates on a grid, and numbers of segments and residue classes, as int32 with room for a class more."""

BRANCH_KINDS = frozenset(cls.kind for cls in (DilatedSegment, SlidingWindow, Strided, GlobalTokens, BlockSparse, Neighborhood))


class BranchArrays(NamedTuple):
    """Contiguous: `kind`, `length`, `rate` `(branches,)`, `grid` 9 each; `offset` to `shown` `(heads, branches)`; tables."""

    kind: Int64Array
    length: Int64Array
    rate: Int64Array
    grid: Int64Array
    offset: Int64Array
    without: Int64Array
    beyond: Int64Array
    shown: Int64Array
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
    offset = np.array([_offsets(at, problem, tables) for at in range(len(branches))], np.int64)
    without, beyond, shown = _left_out(problem, tables)
    offset[beyond >= length[:, None]] = -1  # another band shows all of it
    if (classes := residue_classes(problem)) > 1:  # the rows of one of them, counted from 0
        rate, length, beyond = rate // classes, -(-length // classes), -(-beyond // classes)
    offset, without, beyond, shown = (np.ascontiguousarray(x.T) for x in (offset, without, beyond, shown))
    of_branches = kind, length, rate, grid, offset, without, beyond, shown
    if not tables:
        none = np.empty(0, np.int64)
        return BranchArrays(*of_branches, none, none, none, none)
    stops, counts, columns = (np.concatenate(arrays) for arrays in zip(*tables, strict=True))
    first = np.cumsum([0, *(len(table.stop) for table in tables)], dtype=np.int64)
    ends = np.concatenate(([0], np.cumsum(counts)))
    return BranchArrays(*of_branches, first, stops, ends, columns.reshape(-1))


def residue_classes(problem: Problem) -> int:
    """The distance of which those of all pairs are multiples: rows that differ modulo it see nothing of each other.

    The kernel takes each class of rows as a sequence. Of the last rows of a cache it does not, where rows are few.
    """
    branches = problem.pattern.branches
    if problem.kv_cache or not all(isinstance(branch, (SlidingWindow, Strided)) for branch in branches):
        return 1
    return min(math.gcd(*map(once.rate_of, branches)), UNBOUNDED)


def widest_window(problem: Problem) -> int:
    """The widest window that does not reach over the whole sequence, of packed ones the longest; 0 if there is none."""
    windows = [branch.window for branch in problem.pattern.branches if isinstance(branch, SlidingWindow)]
    return max((window for window in windows if window < problem.seq), default=0)


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


def _offsets(at: int, problem: Problem, tables: list[RunTable]) -> list[int]:
    """For each query head its offset, or the number of its pair of tables; -1 where the branch does not serve it."""
    pattern, heads, kv_heads = problem.pattern, range(problem.heads), problem.kv_heads
    branch, found = pattern.branches[at], [0] * problem.heads
    if isinstance(branch, DilatedSegment):
        rate = branch.dilation_rate
        found = [pattern.head_offset(rate, head * kv_heads // problem.heads, kv_heads) for head in heads]
    elif isinstance(branch, GlobalTokens):
        found = [len(tables) // 2] * problem.heads
        tables += tables_of_globals(branch)
    elif isinstance(branch, BlockSparse):
        known: dict[tuple[tuple[BlockSparse, int], ...], int] = {}
        for head in heads:
            layouts = _layouts(at, problem, head)
            if layouts and layouts not in known:
                known[layouts] = len(tables) // 2
                tables += tables_of_blocks(layouts)
            found[head] = known.get(layouts, -1)
    return [offset if branch.serves(head) else -1 for head, offset in zip(heads, found, strict=True)]


def _layouts(at: int, problem: Problem, head: int) -> tuple[tuple[BlockSparse, int], ...]:
    """What branch `at` of blocks shows to a query head: its own layout, or once, if it is the first one, those of all."""
    branches = problem.pattern.branches
    places = [i for i, branch in enumerate(branches) if isinstance(branch, BlockSparse) and branch.serves(head)]
    if problem.pattern.overlap == "count" or at not in places:
        places = [at]
    elif at != places[0]:
        return ()
    chosen = (branch for i in places if isinstance(branch := branches[i], BlockSparse))
    return tuple((branch, problem.first_head + head if branch.layout.heads > 1 else 0) for branch in chosen)


def _left_out(problem: Problem, tables: list[RunTable]) -> tuple[Int64Array, Int64Array, Int64Array]:
    """What each branch leaves out for each query head so that pairs count once.

    That is the number of two tables of tokens, the distance from which a band begins, and a set of branches.
    """
    import numpy as np

    branches, sizes = problem.pattern.branches, (len(problem.pattern.branches), problem.heads)
    without, beyond, shown = np.full(sizes, -1), np.zeros(sizes, np.int64), np.zeros(sizes, np.uint64)
    if problem.pattern.overlap == "count" or problem.pattern.only_segments:
        return without, beyond, shown.view(np.int64)
    known: dict[tuple[GlobalTokens, ...], int] = {(): -1}
    for at, head in product(range(len(branches)), range(problem.heads)):
        left_out = once.globals_before(branches, at, head)
        if left_out not in known:
            known[left_out] = len(tables) // 2
            tables += tables_left_out(left_out)
        without[at, head], beyond[at, head] = known[left_out], once.beyond(branches, at, head)
        shown[at, head] = sum(1 << i for i in once.shown_before(branches, at, head))
    return without, beyond, shown.view(np.int64)
