"""Parts: rows that one head keeps of a segment and one rank holds, and their numbers in tensors and messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilkit.comm.passes import _rows
from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.plan.spread import Spread

Run = tuple[int, int, int, int, int]
"""`(start, step, count, width, batch_step)`: see `dilkit.comm.passes._rows.expand`."""


class Part(NamedTuple):
    """Rows `first .. last - 1`, counted among those that a head keeps of a segment, out of one rank's shard."""

    spread: Spread
    head: int
    first: int
    last: int

    @property
    def count(self) -> int:
        return self.last - self.first

    @property
    def width(self) -> int:
        """Query heads."""
        return self.spread.heads[self.head].width


def expand(runs: Sequence[Run], batch: int) -> Tensor:
    """The row numbers of all runs, int64 `(batch * rows,)`."""
    table = np.array(runs, np.int64).reshape(-1, 5)
    rows: NDArray[np.int64] = np.empty(batch * int((table[:, 2] * table[:, 3]).sum()), np.int64)
    _rows.expand(rows, table, batch)
    return torch.from_numpy(rows)


def row_run(plan: ExchangePlan, rank: int, part: Part, role: str) -> Run:
    """The rows of a part in its rank's tensors, as `(batch, seq, heads)` numbers."""
    spread, head = part.spread, part.spread.heads[part.head]
    start, stop = plan.cuts[rank : rank + 2]
    row = spread.start + head.offset + part.first * spread.rate - start
    heads = plan.heads if role == "q" else plan.kv_heads
    first, width = (head.first, head.width) if role == "q" else (head.kv_head, 1)
    return row * heads + first, spread.rate * heads, part.count, width, (stop - start) * heads


def part_of(spread: Spread, head: int, member: int) -> Part | None:
    """The rows of a head that a member of a spread holds; None if there are none."""
    first, last = spread.kept[member : member + 2, head].tolist()
    return Part(spread, head, first, last) if first < last else None


def block_parts(spread: Spread, head: int, block: int) -> list[Part]:
    """The rows of a head in a block, by member."""
    members = range(*spread.groups[block : block + 2].tolist())
    return [part for member in members if (part := part_of(spread, head, member))]


def part_key(part: Part) -> tuple[int, int, int]:
    """What names a part."""
    return id(part.spread), part.head, part.first
