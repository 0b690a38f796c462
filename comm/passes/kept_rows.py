"""Kept rows: those that one head keeps of a segment and one rank holds; and their numbers in tensors and messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilkit.comm.passes._rows import expand_runs
from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.plan.sharded_segments import ShardedSegment

HOST = torch.device("cpu")
"""Where row numbers are made."""
RowRun = tuple[int, int, int, int, int]
"""`(start, step, count, width, batch_step)`: see `dilkit.comm.passes._rows.expand_runs`."""
RowsKey = tuple[int, int, int]
"""What identifies kept rows: their segment, their head, and their first row."""


class KeptRows(NamedTuple):
    """Rows `first .. last - 1`, counted among those that a head keeps of a segment, all in one rank's shard."""

    segment: ShardedSegment
    head: int
    first: int
    last: int

    @property
    def positions(self) -> int:
        """How many positions of the sequence: rows of keys."""
        return self.last - self.first

    @property
    def width(self) -> int:
        """Query heads of the key/value head: each position has so many rows of queries."""
        return self.segment.heads[self.head].width

    @property
    def key(self) -> RowsKey:
        """What identifies these rows."""
        return id(self.segment), self.head, self.first


def kept_rows(segment: ShardedSegment, head: int, member: int) -> KeptRows | None:
    """The rows of a head that the rank `segment.ranks[member]` holds; None if there are none."""
    first, last = segment.kept[member : member + 2, head].tolist()
    return KeptRows(segment, head, first, last) if first < last else None


def group_kept_rows(segment: ShardedSegment, head: int, group: int) -> list[KeptRows]:
    """The rows of a head that the ranks of a group hold, one item a rank."""
    members = range(*segment.group_bounds[group : group + 2].tolist())
    return [rows for member in members if (rows := kept_rows(segment, head, member))]


def row_numbers(runs: Sequence[RowRun], batch: int) -> Tensor:
    """The row numbers of all runs, int64 `(batch * rows,)`."""
    table = np.array(runs, np.int64).reshape(-1, 5)
    rows: NDArray[np.int64] = np.empty(batch * int((table[:, 2] * table[:, 3]).sum()), np.int64)
    expand_runs(rows, table, batch)
    return torch.from_numpy(rows)


def row_run(plan: ExchangePlan, rank: int, rows: KeptRows, role: str) -> RowRun:
    """Where kept rows lie in their rank's tensor of queries (`role` "q") or keys and values, as `(batch, seq, heads)` numbers."""
    segment, head = rows.segment, rows.segment.heads[rows.head]
    start, stop = plan.cuts[rank : rank + 2]
    row = segment.start + head.offset + rows.first * segment.rate - start
    heads = plan.heads if role == "q" else plan.kv_heads
    first, width = (head.first, head.width) if role == "q" else (head.kv_head, 1)
    return row * heads + first, segment.rate * heads, rows.positions, width, (stop - start) * heads
