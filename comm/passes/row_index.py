"""Row numbers in tensors `(batch, seq, heads, head_dim)`, rows taken and added by them, and columns of rows packed into bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilkit.comm.passes._rows import expand_runs
from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.plan.messages import HeadRows

HOST = torch.device("cpu")
RowRun = tuple[int, int, int, int, int]
"""`(start, step, count, width, batch_step)`: see `dilkit.comm.passes._rows.expand_runs`."""
_FEWEST, _BLOCKS = 1024, 16
"""Rows are added so many at a time at least, and in so many blocks at most."""


def row_numbers(runs: Sequence[RowRun], batch: int) -> Tensor:
    """Return the row numbers of all runs, int64 `(batch * rows,)`."""
    table = np.array(runs, np.int64).reshape(-1, 5)
    rows: NDArray[np.int64] = np.empty(batch * int((table[:, 2] * table[:, 3]).sum()), np.int64)
    expand_runs(rows, table, batch)
    return torch.from_numpy(rows)


def own_row_numbers(plan: ExchangePlan, rank: int, rows: Iterable[HeadRows], role: str, batch: int) -> Tensor:
    """Return the numbers of rows in their rank's tensor of queries (`role` "q") or of keys and values."""
    start, stop = plan.cuts[rank : rank + 2]
    heads, runs = plan.heads if role == "q" else plan.kv_heads, []
    for one in rows:
        first, width = (one.head.first, one.head.width) if role == "q" else (one.head.kv_head, 1)
        runs.append(((one.start - start) * heads + first, one.step * heads, one.size, width, (stop - start) * heads))
    return row_numbers(runs, batch)


def collect_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Copy the rows of `x` `(batch, seq, heads, d)` by their numbers, read where they lie if heads lie next to each other."""
    batch, seq, heads, d = x.shape
    by_batch, by_row, by_head, by_number = x.stride()
    if x.is_contiguous() or by_number != 1 or (by_head != d and heads > 1) or by_row % d or (batch > 1 and by_batch % d):
        return x.reshape(-1, d).index_select(0, rows)
    span = ((batch - 1) * by_batch + (seq - 1) * by_row) // d + heads
    position = rows // heads
    places = rows % heads + position % seq * (by_row // d) + position // seq * (by_batch // d)
    return x.as_strided((span, d), (d, 1)).index_select(0, places)


def add_rows(x: Tensor, rows: Tensor, more: Tensor) -> None:
    """Add `more` `(len(rows), d)` to rows of a contiguous `x`, each at most once, block by block to copy little at a time."""
    table, size = x.view(-1, x.shape[-1]), max(_FEWEST, -(-len(rows) // _BLOCKS))
    for some, block in zip(torch.split(rows, size), torch.split(more, size), strict=True):
        table[some] = (table[some].to(more.dtype) + block).to(x.dtype)


def pack_columns(*columns: Tensor) -> Tensor:
    """Join columns `(rows, width)` of any dtypes side by side, as bytes `(rows, bytes)`."""
    return torch.cat([column.contiguous().view(torch.uint8) for column in columns], dim=1)


def unpack_columns(rows: Tensor, *columns: tuple[int, torch.dtype]) -> list[Tensor]:
    """Split what `pack_columns` joined into columns of these `(width, dtype)`."""
    sizes = [width * dtype.itemsize for width, dtype in columns]
    parts = torch.split(rows, sizes, dim=1)
    # A single row counts as contiguous wherever it begins, but numbers must begin where their size divides the address.
    copies = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return [part.view(dtype) for part, (_, dtype) in zip(copies, columns, strict=True)]
