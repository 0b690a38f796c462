"""Tables of runs of consecutive rows, and the runs of columns that they see: of global tokens and of blocks.

A pair of tables says the same of queries as rows and of keys as rows. kernels/native.h says how the kernel reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dilkit.pattern import BlockSparse, GlobalTokens
from dilkit.pattern.runs import UNBOUNDED, runs_of, union

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]


class RunTable(NamedTuple):
    """Runs of consecutive rows, ascending and complete, and the runs of columns that each of them sees.

    Run r of the rows ends before `stop[r]`; its runs of columns, as many as `runs[r]`, are the next ones of `columns`
    `(all runs, 2)`: start and stop.
    """

    stop: Int64Array
    runs: Int64Array
    columns: Int64Array


def tables_of_blocks(layouts: Sequence[tuple[BlockSparse, int]]) -> tuple[RunTable, RunTable]:
    """What any of these layouts shows, each of a branch for one of its heads."""
    queries, keys = zip(*(_block_tables(branch, head) for branch, head in layouts), strict=True)
    return _any_of(queries), _any_of(keys)


def _any_of(tables: Sequence[RunTable]) -> RunTable:
    """Each row sees what it sees in any of the tables."""
    import numpy as np

    if len(tables) == 1:
        return tables[0]
    stops, seen = np.unique(np.concatenate([table.stop for table in tables])), []
    ends = [np.concatenate(([0], np.cumsum(table.runs))) for table in tables]
    for first in (0, *stops[:-1]):
        at = [int(np.searchsorted(table.stop, first, side="right")) for table in tables]
        parts = [
            table.columns[end[i] : end[i + 1]] for table, end, i in zip(tables, ends, at, strict=True) if i < len(table.stop)
        ]
        seen.append(union(*parts))
    return RunTable(stops, np.array([len(columns) for columns in seen]), np.concatenate(seen))


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


def tables_of_globals(branch: GlobalTokens) -> tuple[RunTable, RunTable]:
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


def tables_left_out(left_out: tuple[GlobalTokens, ...]) -> tuple[RunTable, RunTable]:
    """The queries that see all by these branches, and the keys that are seen by all: rows that see something in a table."""
    import numpy as np

    queries = [runs_of(branch) for branch in left_out if branch.direction == "both"]
    keys = [runs_of(branch) for branch in left_out]
    nothing, something = np.empty((0, 2), np.int64), np.array([[0, UNBOUNDED]])
    all_queries, all_keys = union(*queries), union(*keys)
    return _global_table(all_queries, something, nothing), _global_table(all_keys, something, nothing)
