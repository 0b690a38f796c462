"""Pages of a cache: `block_table[b, i]` is the block that holds rows `i * page` to `(i + 1) * page - 1` of sequence b."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilkit.integrations.flash_attn.calls import tensors_of
from dilkit.op.boundary import check_device, check_tensor
from dilkit.op.sequences import check_cu_seqlens, checked_longest

PAGES = "(blocks, page, heads_k, head_dim)"


def check_table(block_table: Any, k: Tensor, batch: int) -> Tensor:
    """Return a block table. Raises TypeError or ValueError unless it is int32 `(batch, pages)` on the device of `k`."""
    table = check_tensor("block_table", block_table, "an int32 torch.Tensor (batch, pages)")
    if table.dtype != torch.int32:
        raise TypeError(f"block_table is {table.dtype}; torch.int32 is needed (block_table.int())")
    if table.dim() != 2 or table.shape[0] != batch:
        raise ValueError(f"block_table has shape {tuple(table.shape)}; (batch, pages) = ({batch}, pages) is needed")
    check_device("block_table", table, k)
    return table


def places(table: Tensor, sequence: Tensor, position: Tensor, page: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Return the block and the row in it of positions of sequences. Raises ValueError for one that has no block."""
    number = position // page
    if number.numel() and int(number.max()) >= table.shape[1]:
        row = int(position.max())
        raise ValueError(f"block_table has {table.shape[1]} pages of {page} rows; a sequence has a row {row}: add pages")
    block = table[sequence, number].long()
    if block.numel() and not 0 <= int(block.min()) <= int(block.max()) < blocks:
        wrong = int(block.min()) if int(block.min()) < 0 else int(block.max())
        raise ValueError(f"block_table names block {wrong}; there are blocks 0 to {blocks - 1}")
    return block, position % page


def packed_pages(k: Any, v: Any, starts: Any, block_table: Any) -> tuple[Tensor, Tensor]:
    """Copy the rows of sequences that begin at `starts`, cu_seqlens_k, out of their pages, one sequence after the other."""
    k, v = tensors_of(PAGES, k=k, v=v)
    check_cu_seqlens(starts, k, 0, "cu_seqlens_k", "k")
    lengths = starts.diff().long()
    table = check_table(block_table, k, len(lengths))
    checked_longest(starts, int(starts[-1]), "cu_seqlens_k", "k")
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=k.device), lengths)
    position = torch.arange(len(sequence), device=k.device) - starts[:-1].long()[sequence]
    block, row = places(table, sequence, position, k.shape[1], k.shape[0])
    return k[block, row], v[block, row]
