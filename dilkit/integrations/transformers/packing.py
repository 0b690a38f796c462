"""Padded batches as packed sequences, and where packed sequences begin.

    tokens (batch, seq)    . . A A A        rows that are packed    A A A B B B B B
                           B B B B B        cu_seqlens              0     3         8

Under `torch.compile` no shape may depend on the numbers in a tensor: there all rows are packed, padding behind the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Packing:
    """`cu_seqlens`: where sequences begin. `longest`: no sequence has more tokens.

    `rows`: batch and place of each packed row, in order; None means all, as they are.
    """

    cu_seqlens: Tensor
    longest: int
    rows: tuple[Tensor, ...] | None = None

    def to(self, device: torch.device | str | int, **options: Any) -> Packing:
        rows = None if self.rows is None else tuple(places.to(device, **options) for places in self.rows)
        return Packing(self.cu_seqlens.to(device, **options), self.longest, rows)

    def pack(self, x: Tensor) -> Tensor:
        """Reshape `(batch, seq, heads, head_dim)` to `(total, heads, head_dim)`."""
        return x.flatten(0, 1) if self.rows is None else x[self.rows]

    def unpack(self, packed: Tensor, batch: int, seq: int) -> Tensor:
        """Move `(total, heads, head_dim)` to `(batch, seq, heads, head_dim)`, 0 where there is no token."""
        if self.rows is None:
            return packed.view(batch, seq, *packed.shape[1:])
        return packed.new_zeros(batch, seq, *packed.shape[1:]).index_put(self.rows, packed)


def of_tokens(tokens: Tensor) -> Packing:
    """Pack the tokens, bool `(batch, seq)`, of a padded batch: one sequence for each element of the batch."""
    seq, lengths = tokens.shape[1], tokens.sum(1)
    ends = F.pad(lengths.cumsum(0), (1, 0))
    if not torch.compiler.is_compiling():
        return Packing(ends.int(), seq, tokens.nonzero(as_tuple=True))
    total = tokens.numel()
    order = (~tokens).flatten().to(torch.int8).argsort(stable=True)
    alone = (ends[-1] + torch.arange(1, total + 1, device=tokens.device)).clamp(max=total)  # each row of padding by itself
    return Packing(torch.cat((ends, alone)).int(), seq, (order // seq, order % seq))


def of_positions(position_ids: Tensor, batch: int) -> Packing | None:
    """Pack sequences that begin where positions `(batch or 1, seq)` do not go on by 1; None where all rows are one sequence."""
    goes_on = position_ids.diff() == 1
    return of_neighbours(goes_on.expand(batch, goes_on.shape[1]))


def of_neighbours(goes_on: Tensor) -> Packing | None:
    """Pack sequences by `goes_on`, bool `(batch, seq - 1)`: True where rows 1, 2, ... continue the one before.

    None where each element of the batch is one sequence, which `torch.compile` cannot know.
    """
    if not torch.compiler.is_compiling() and bool(goes_on.all()):
        return None
    begins, (batch, before) = ~F.pad(goes_on, (1, 0)).flatten(), goes_on.shape
    total = batch * (before + 1)
    places = torch.arange(total + 1, device=begins.device)
    rows, end = places[:-1], places[-1:]  # not the number: torch.compile would make one graph for each
    starts = rows.where(begins, end).sort().values if torch.compiler.is_compiling() else rows[begins]
    return Packing(torch.cat((starts, end)).int(), before + 1)
