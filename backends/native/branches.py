"""The forms of a pattern as the C kernel reads them: arrays of numbers. kernels/native.h says what they mean.

Segments       SEGMENTS   length, rate, an offset for each head
Band           BAND       length, how far ahead, rate
Global, Runs   RUNS       runs of rows, each with the runs of columns that it sees: queries as rows, then keys
Given          RUNS       the same, in tables of each call (given.py)
Grid, CutGrid  GRID       sizes, kernel sizes, dilations, strides, causality of three dimensions, and whether edges cut

A branch of the kernel is what forms of one branch of the pattern have in common; by head they differ in offset and tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dilkit.pattern.lowering import Band, CutGrid, Form, Given, GivenBlocks, Global, Grid, Runs, RunTable, Segments
from dilkit.pattern.lowering.forms import WindowAxis
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


class BranchArrays(NamedTuple):
    """Contiguous: `kind` to `rate` `(branches,)`, `grid` 16 each; `offset` to `shown` `(heads, branches)`; then tables."""

    kind: Int64Array
    length: Int64Array
    ahead: Int64Array
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


class KernelBranch(NamedTuple):
    """Fields shared by the forms of branch `number` of a pattern."""

    number: int
    kind: int
    length: int
    ahead: int = 0
    rate: int = 1
    grid: tuple[int, ...] = (1,) * 16

    @classmethod
    def of(cls, form: Form) -> KernelBranch:
        """Return the kernel branch of a form."""
        if isinstance(form, Segments):
            return cls(form.branch, SEGMENTS, form.length, rate=form.rate)
        if isinstance(form, Band):
            return cls(form.branch, BAND, min(form.back + 1, UNBOUNDED), form.ahead, form.rate)
        if isinstance(form, Grid):
            axes = [WindowAxis(1, 1)] * (3 - len(form.shape)) + form.axes  # those that a grid has not are the first ones
            fields = zip(*(axis[:-1] for axis in axes), strict=True)
            grid = (min(int(number), UNBOUNDED) for numbers in fields for number in numbers)
            return cls(form.branch, GRID, min(form.shape[-1], UNBOUNDED), grid=(*grid, int(isinstance(form, CutGrid))))
        return cls(form.branch, RUNS, form.block if isinstance(form, (Runs, GivenBlocks)) else UNBOUNDED)


def kernel_branches(forms: Sequence[Form]) -> list[KernelBranch]:
    """Return the kernel's branches for these forms, in the order of the pattern."""
    return sorted({KernelBranch.of(form) for form in forms})


def given_branch(forms: Sequence[Form]) -> int:
    """Return the index of the kernel branch whose tables come with each call; -1 without one."""
    branches = [KernelBranch.of(form) for form in forms if isinstance(form, Given)]
    return kernel_branches(forms).index(branches[0]) if branches else -1


def branch_arrays(problem: Problem) -> BranchArrays:
    """Make the arrays of `problem.pattern`: an offset or a table for each query head."""
    import numpy as np

    forms, tables = problem.forms, TablePairs()
    branches = kernel_branches(forms)
    numbers = zip(*(branch[1:5] for branch in branches), strict=True)
    kind, length, ahead, rate = (np.array(values, np.int64) for values in numbers)
    grid = np.array([branch.grid for branch in branches], np.int64).reshape(-1)
    places = [branches.index(KernelBranch.of(form)) for form in forms]
    offset, without = (np.full((problem.heads, len(branches)), -1, np.int64) for _ in range(2))
    beyond = np.zeros((problem.heads, len(branches)), np.int64)
    shown = np.zeros((problem.heads, len(branches)), np.uint64)
    for form, at in zip(forms, places, strict=True):
        served = slice(*form.heads), at
        offset[served] = form.offsets if isinstance(form, Segments) else tables.shown_by(form)
        without[served] = tables.left_out(form)
        beyond[served] = form.first if isinstance(form, Band) else 0
        shown[served] = 0 if isinstance(form, Segments) else sum(1 << places[i] for i in form.without)
    if (classes := residue_classes(problem)) > 1:  # the rows of one of them, counted from 0
        rate, length, ahead, beyond = rate // classes, -(-length // classes), ahead // classes, -(-beyond // classes)
    return BranchArrays(kind, length, ahead, rate, grid, offset, without, beyond, shown.view(np.int64), *tables.arrays())


class TablePairs:
    """Pairs of tables by their number: with queries as rows, and with keys as rows."""

    def __init__(self) -> None:
        self._tables: list[RunTable] = []
        self._numbers: dict[Hashable, int] = {}

    def shown_by(self, form: Form) -> int:
        """Return the index of the pair of tables that describes a form; 0 for a form without one."""
        if isinstance(form, Runs):
            return self._number(id(form.queries), lambda: (form.queries, form.keys))
        if isinstance(form, Global):
            sides = (form.rows, form.columns), (form.columns, form.rows)
            return self._number(tuple(map(id, sides[0])), lambda: tuple(_inside_and_outside(x, y) for x, y in sides))
        return 0

    def left_out(self, form: Form) -> int:
        """Return the index of the pair of tables whose nonempty rows a form excludes; -1 if it excludes none."""
        rows, columns = form.without_rows, form.without_columns
        if rows is None or columns is None:
            return -1
        key = "left out", rows.tobytes(), columns.tobytes()
        return self._number(key, lambda: tuple(_inside_and_outside(x, x[:0]) for x in (rows, columns)))

    def arrays(self) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        """Return `table`, `rows_end`, `first_columns` and `columns` of `BranchArrays`."""
        import numpy as np

        none = np.empty(0, np.int64)
        if not self._tables:
            return none, none, none, none
        stops, counts, columns = (np.concatenate(arrays) for arrays in zip(*self._tables, strict=True))
        first = np.cumsum([0, *(len(table.stop) for table in self._tables)], dtype=np.int64)
        return first, stops, np.concatenate(([0], np.cumsum(counts))), columns.reshape(-1)

    def _number(self, key: Hashable, make: Callable[[], tuple[RunTable, ...]]) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self._tables) // 2
            self._tables += make()
        return self._numbers[key]


def _inside_and_outside(rows: Int64Array, outside: Int64Array) -> RunTable:
    """Make a table in which the rows in `rows` see all columns, and the others `outside`."""
    import numpy as np

    # Before each run of `rows` is one of others, and one after the last; the first is empty where row 0 is in `rows`.
    stop = np.append(rows.reshape(-1), UNBOUNDED)
    seen = [outside, np.array([[0, UNBOUNDED]])] * len(rows) + [outside]
    return RunTable(stop, np.array([len(columns) for columns in seen]), np.concatenate(seen))


def residue_classes(problem: Problem) -> int:
    """Return the largest stride that divides all distances of visible pairs. The kernel treats each class as a sequence.

    For the last rows of a cache, which are few, it is 1.
    """
    rates = [form.rate if isinstance(form, Band) else 1 for form in problem.forms]
    return 1 if problem.kv_cache or problem.queries is not None else min(math.gcd(*rates), UNBOUNDED)


def widest_window(problem: Problem) -> int:
    """Return the widest window that is narrower than the (longest) sequence; 0 without one."""
    windows = [reach + 1 for form in problem.forms if isinstance(form, Band) for reach in (form.back, form.ahead)]
    return max((window for window in windows if window < problem.span), default=0)
