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
"""The device on which row numbers are made."""
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


def row_table(x: Tensor) -> tuple[Tensor, int, int]:
    """`x` `(batch, seq, heads, d)` as rows `(n, d)`, with the steps of seq and batch in rows.

    A view where heads lie next to each other, as in views of a joint projection, else a copy.
    """
    batch, seq, heads, d = x.shape
    by_batch, by_row, by_head, by_number = x.stride()
    if heads == 1:
        by_head = d
    in_rows = by_number == 1 and by_head == d and by_row % d == 0 and (batch == 1 or by_batch % d == 0)
    if x.numel() == 0 or not in_rows:
        return x.reshape(-1, d), heads, seq * heads
    span = ((batch - 1) * by_batch + (seq - 1) * by_row) // d + heads
    return x.as_strided((span, d), (d, 1)), by_row // d, by_batch // d


def collect_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Copies of the rows of `x` `(batch, seq, heads, d)` by their numbers in `(batch * seq * heads)`: `(len(rows), d)`."""
    table, by_row, by_batch = row_table(x)
    _, seq, heads, _ = x.shape
    if (by_row, by_batch) != (heads, seq * heads):
        position = rows // heads
        rows = rows % heads + position % seq * by_row + position // seq * by_batch
    return table.index_select(0, rows)


def add_rows(x: Tensor, rows: Tensor, more: Tensor) -> None:
    """Add `more` `(len(rows), d)` to rows of a contiguous `x` `(batch, seq, heads, d)`, each at most once.

    Block by block, so that little is copied at a time.
    """
    table, size = x.view(-1, x.shape[-1]), max(_FEWEST, -(-len(rows) // _BLOCKS))
    for some, block in zip(torch.split(rows, size), torch.split(more, size), strict=True):
        table[some] = (table[some].to(more.dtype) + block).to(x.dtype)


def pack_columns(*columns: Tensor) -> Tensor:
    """Columns `(rows, width)` of any dtypes side by side, as bytes `(rows, bytes)`."""
    return torch.cat([column.contiguous().view(torch.uint8) for column in columns], dim=1)


def unpack_columns(rows: Tensor, *columns: tuple[int, torch.dtype]) -> list[Tensor]:
    """The columns that `pack_columns` joined, given as `(width, dtype)`."""
    sizes = [width * dtype.itemsize for width, dtype in columns]
    parts = torch.split(rows, sizes, dim=1)
    # A single row counts as contiguous wherever it begins, but numbers must begin where their size divides the address.
    copies = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return [part.view(dtype) for part, (_, dtype) in zip(copies, columns, strict=True)]
