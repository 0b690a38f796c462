"""`RunTable`: the runs of columns that each run of consecutive rows sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dilkit.pattern.runs import Positions, union


class RunTable(NamedTuple):
    """Runs of consecutive rows, ascending and complete, and the runs of columns that each of them sees.

    Run r of the rows ends before `stop[r]`; its runs of columns, as many as `runs[r]`, are the next ones of `columns`
    `(all runs, 2)`: start and stop.
    """

    stop: Positions
    runs: Positions
    columns: Positions

    @classmethod
    def of_blocks(cls, runs: Positions, blocks: int, block_size: int) -> RunTable:
        """Make a table of blocks from `runs` `(n, 3)`, ascending: a block of rows, the first block it sees, one past the last."""
        row, first, last = runs.T
        goes_on = (row[1:] == row[:-1]) & (first[1:] == last[:-1])
        begins, ends = np.append(True, ~goes_on)[: len(row)], np.append(~goes_on, True)[: len(row)]
        columns = np.stack((first[begins], last[ends]), axis=1) * block_size
        stop = np.arange(1, blocks + 1, dtype=np.int64) * block_size
        return cls(stop, np.bincount(row[begins], minlength=blocks).astype(np.int64), columns.astype(np.int64))

    def joined(self) -> RunTable:
        """Join consecutive rows that see the same columns into one run."""
        row = np.repeat(np.arange(len(self.runs)), self.runs)
        before = (np.arange(len(row)) - np.append(0, self.runs)[row]).clip(0)  # the same column's place in the row before
        differs = (self.columns != self.columns[before]).any(1)
        changed = np.append(True, self.runs[1:] != self.runs[:-1])
        changed |= np.bincount(row[differs], minlength=len(self.runs)) > 0
        last = np.append(changed[1:], True)
        return RunTable(self.stop[last], self.runs[changed], self.columns[np.repeat(changed, self.runs)])

    def below(self, seq: int) -> RunTable:
        """Cut the table to the rows and columns below `seq`."""
        count = int(np.searchsorted(self.stop, seq)) + 1
        row, columns = np.repeat(np.arange(len(self.runs)), self.runs), np.minimum(self.columns, seq)
        left = (columns[:, 0] < columns[:, 1]) & (row < count)
        runs = np.bincount(row[left], minlength=len(self.runs))[:count]
        return RunTable(np.minimum(self.stop[:count], seq), runs, columns[left])

    @classmethod
    def any_of(cls, tables: Sequence[RunTable]) -> RunTable:
        """Unite tables: a row sees the columns that it sees in any of them."""
        if len(tables) == 1:
            return tables[0]
        stops, seen = np.unique(np.concatenate([table.stop for table in tables])), []
        ends = [np.concatenate(([0], np.cumsum(table.runs))) for table in tables]
        for first in (0, *stops[:-1]):
            parts = []
            for table, end in zip(tables, ends, strict=True):
                run = int(np.searchsorted(table.stop, first, side="right"))
                if run < len(table.stop):
                    parts.append(table.columns[end[run] : end[run + 1]])
            seen.append(union(*parts))
        return cls(stops, np.array([len(columns) for columns in seen]), np.concatenate(seen))


def hash_of_pairs(table: RunTable, seq: int, turned: bool = False) -> int:
    """Return a hash of the pairs of `table` below `seq`. With `turned`, the transposed table has the same hash.

        sum over runs of rows and their columns of  (f(stop) - f(start)) * (g(stop) - g(start))  mod 2**64

    Here f and g hash positions of queries and of keys, and change places where `turned`.
    """
    of_rows, of_columns = (0, 1) if not turned else (1, 0)
    rows = np.diff(_hashed(np.minimum(table.stop, seq), of_rows), prepend=_hashed(np.zeros(1, np.int64), of_rows))
    columns = np.diff(_hashed(np.minimum(table.columns, seq), of_columns), axis=1)[:, 0]
    return int((np.repeat(rows, table.runs) * columns).sum(dtype=np.uint64))


def _hashed(positions: Positions, salt: int) -> Any:
    """Return 64 bits for each position (SplitMix64)."""
    mixed = (positions.astype(np.uint64) * np.uint64(2) + np.uint64(salt + 1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def turned(runs: Positions) -> Positions:
    """Transpose `runs` `(n, 3)`: a row's run of columns becomes runs of rows for each column. Memory is that of the result.

    >>> import numpy as np
    >>> turned(np.array([[0, 0, 2], [1, 1, 3]])).tolist()
    [[0, 0, 1], [1, 0, 2], [2, 1, 2]]
    """
    row, first, last = runs.T
    rows, edges = np.concatenate((row, row, row + 1, row + 1)), np.concatenate((first, last, first, last))
    order = np.lexsort((edges, rows))
    rows, edges = rows[order], edges[order]
    change = np.cumsum(np.repeat((1, -1, -1, 1), len(row))[order])  # 1 where runs of rows begin, -1 where they end
    count = np.append(np.diff(edges), 0) * (change != 0)
    edge = np.repeat(np.arange(len(count)), count)
    columns = np.arange(len(edge)) - (np.cumsum(count) - count)[edge] + edges[edge]
    order = np.lexsort((rows[edge], columns))
    columns, rows = columns[order], rows[edge][order]
    return np.stack((columns[::2], rows[::2], rows[1::2]), axis=1)
