"""Rows in and out of tensors `(batch, seq, heads, head_dim)`, by number; and columns of rows packed into bytes."""

from __future__ import annotations

import torch
from torch import Tensor

_FEWEST, _BLOCKS = 1024, 16
"""Rows are added so many at a time at least, and in so many blocks at most."""


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
