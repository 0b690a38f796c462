"""The kept rows of segments, and the numbers of kept rows in tensors and messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilkit.comm.passes._rows import expand_runs
from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.plan.kept_rows import KeptRows
from dilkit.comm.plan.sharded_segments import ShardedSegment

HOST = torch.device("cpu")
"""Where row numbers are made."""
RowRun = tuple[int, int, int, int, int]
"""`(start, step, count, width, batch_step)`: see `dilkit.comm.passes._rows.expand_runs`."""


def kept_rows(segment: ShardedSegment, head: int, member: int) -> KeptRows | None:
    """The rows of a head that the rank `segment.ranks[member]` holds; None if there are none."""
    first, last = segment.kept[member : member + 2, head].tolist()
    if first == last:
        return None
    served = segment.heads[head]
    start = segment.start + served.offset + first * segment.rate
    return KeptRows(segment.branch, start, segment.rate, last - first, served.kv_head, served.first, served.width)


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
    start, stop = plan.cuts[rank : rank + 2]
    heads = plan.heads if role == "q" else plan.kv_heads
    first, width = (rows.first, rows.width) if role == "q" else (rows.kv_head, 1)
    return (rows.start - start) * heads + first, rows.step * heads, rows.positions, width, (stop - start) * heads
