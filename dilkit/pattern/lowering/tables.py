"""`RunTable`: which runs of columns each run of consecutive rows sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dilkit.pattern.runs import union

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

    @classmethod
    def of_blocks(cls, layout: NDArray[np.bool_], block_size: int) -> RunTable:
        """The rows block by block; blocks of columns that are seen one after the other are one run."""
        import numpy as np

        steps = np.diff(np.pad(layout, ((0, 0), (1, 1))).astype(np.int8), axis=1)
        rows, starts = np.nonzero(steps == 1)
        columns = np.stack((starts, np.nonzero(steps == -1)[1]), axis=1) * block_size
        stop = np.arange(1, len(layout) + 1, dtype=np.int64) * block_size
        return cls(stop, np.bincount(rows, minlength=len(layout)).astype(np.int64), columns.astype(np.int64))

    @classmethod
    def any_of(cls, tables: Sequence[RunTable]) -> RunTable:
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
        return cls(stops, np.array([len(columns) for columns in seen]), np.concatenate(seen))
