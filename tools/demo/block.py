"""What the transformers of both demos are made of, and the sizes that their reports give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilkit import DilatedCache, MultiheadDilatedAttention, Pattern, Problem
from dilkit.tools.demo.text.record import ModelFacts

M = TypeVar("M", bound=ModelFacts)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). `inner` is the attention; `options`: of the module around it."""

    def __init__(self, width: int, heads: int, inner: nn.Module, **options: Any) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = MultiheadDilatedAttention(width, heads, inner, **options)
        self.mlp_norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cache: DilatedCache | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cache=cache)[0]
        hidden = F.relu(self.up(self.mlp_norm(x))).square()  # as good as GELU here, and cheaper
        out: Tensor = x + self.down(hidden)
        return out


@torch.no_grad()
def scale_updates(blocks: Sequence[Block], factor: float) -> None:
    """Make what the blocks add to the residual stream small at first: by `factor` over the root of the number of updates."""
    for block in blocks:
        for linear in (block.attention.out_proj, block.down):
            linear.weight.mul_(factor / math.sqrt(2 * len(blocks)))


def model_facts(kind: type[M], model: nn.Module, layers: int, problem: Problem, **more: Any) -> M:
    """The sizes of a model whose layers all pose `problem` in training."""
    return kind(
        parameters=sum(p.numel() for p in model.parameters()),
        context=problem.seq,
        width=problem.heads * problem.head_dim,
        layers=layers,
        heads=problem.heads,
        dtype=problem.dtype,
        pattern=str(problem.pattern),
        share_of_dense=problem.flops() / replace(problem, pattern=Pattern.dense()).flops(),
        **more,
    )
