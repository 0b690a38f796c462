"""The block that the transformers of both demos are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilkit import MultiheadDilatedAttention


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). `inner` is the attention; `options`: of the module around it."""

    def __init__(self, width: int, heads: int, inner: nn.Module, **options: Any) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = MultiheadDilatedAttention(width, heads, inner, **options)
        self.mlp_norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))[0]
        hidden = F.relu(self.up(self.mlp_norm(x))).square()  # as good as GELU here, and cheaper
        out: Tensor = x + self.down(hidden)
        return out


@torch.no_grad()
def scale_updates(blocks: Sequence[Block], factor: float) -> None:
    """Make what the blocks add to the residual stream small at first: by `factor` over the root of the number of updates."""
    for block in blocks:
        for linear in (block.attention.out_proj, block.down):
            linear.weight.mul_(factor / math.sqrt(2 * len(blocks)))
