"""`Layout`: what all tensors of a cache have in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dilkit.decoding.stored import width_of


@dataclass(frozen=True)
class Layout:
    """Sizes, dtype and device."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    stored: torch.dtype
    """The dtype of the rows that are kept."""

    @property
    def width(self) -> int:
        """Elements of a row that is kept."""
        return width_of(self.head_dim, self.stored)
