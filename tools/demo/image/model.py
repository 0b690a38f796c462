"""The image demo's model: a transformer over the patches of a picture, some of them hidden, that predicts the hidden ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dilkit import DilatedAttention, Pattern, Problem, order
from dilkit.device import probe
from dilkit.tools.demo.block import Block, scale_updates

PATTERN = Pattern([64, 256, 1024], [1, 2, 4])
"""Of 1,024 tokens: 64 whole, 1 in 2 of 256, 1 in 4 of them all."""


@dataclass(frozen=True)
class ImageConfig:
    """Sizes of the model and of its task: `grid` x `grid` patches of `patch` x `patch` pixels, a share of them `hidden`."""

    grid: int = 32
    patch: int = 4
    hidden: float = 0.75
    width: int = 64
    layers: int = 3
    heads: int = 4
    pattern: Pattern = PATTERN

    @property
    def crop(self) -> int:
        """The side of a crop in pixels."""
        return self.grid * self.patch

    @property
    def cells(self) -> int:
        """Tokens of a crop."""
        return self.grid**2

    @property
    def places(self) -> Tensor:
        """Row and column of each token, `(cells, 2)`."""
        return torch.cartesian_prod(torch.arange(self.grid), torch.arange(self.grid))

    def problem(self, batch: int) -> Problem:
        """The attention problem that every layer poses in training."""
        sizes: Any = dict(seq=self.cells, heads=self.heads, head_dim=self.width // self.heads, batch=batch)
        return Problem(pattern=self.pattern, device=probe("cpu"), requires_grad=True, **sizes)


class AxialRotary(nn.Module):
    """An inner attention with rotary embeddings of the row in half of the pairs, of the column in the other half.

    Scores then depend on the distance in the picture, down and across, whatever the order of the tokens.
    """

    rotations: Tensor

    def __init__(self, config: ImageConfig, curve: str) -> None:
        super().__init__()
        self.inner = DilatedAttention(config.pattern, order=order((config.grid, config.grid), curve))
        pairs = config.width // config.heads // 4
        speeds = torch.logspace(0, math.log10(math.pi / config.grid), pairs)  # radians a patch; the slowest: pi over the side
        angles = (config.places[..., None] * speeds).flatten(1)
        self.register_buffer("rotations", torch.polar(torch.ones_like(angles), angles)[:, None], persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        out: Tensor = self.inner(self._rotated(query), self._rotated(key), value, **options)
        return out

    def _rotated(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(torch.unflatten(x, -1, (-1, 2)))
        return torch.view_as_real(pairs * self.rotations).flatten(-2)


class PatchTransformer(nn.Module):
    """All patches of crops, from those that are visible: `(n, cells, values)` and bool `(n, cells)`, True = hidden.

    What is hidden is not read: the model predicts differences from the mean of what is visible. The order of the tokens, along
    `curve`, is that of the attention alone. Queries and keys begin with a constant in common: rotated like them, it favours
    patches that are near.
    """

    def __init__(self, config: ImageConfig, curve: str) -> None:
        super().__init__()
        values = 3 * config.patch**2
        self.embedding = nn.Linear(values + 1, config.width)
        blocks = [Block(config.width, config.heads, AxialRotary(config, curve)) for _ in range(config.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, values)
        nn.init.zeros_(self.head.weight)
        scale_updates(blocks, 1.0)
        for block in blocks:
            if block.attention.in_proj_bias is not None:
                nn.init.ones_(block.attention.in_proj_bias[: 2 * config.width])

    def forward(self, patches: Tensor, hidden: Tensor) -> Tensor:
        seen = ~hidden[..., None]
        base = (patches * seen).sum(1, keepdim=True) / seen.sum(1, keepdim=True)
        x = self.embedding(torch.cat([(patches - base) * seen, seen], dim=-1))
        for block in self.blocks:
            x = block(x)
        predicted: Tensor = base + self.head(self.norm(x))
        return predicted


def hidden_loss(predicted: Tensor, patches: Tensor, hidden: Tensor) -> Tensor:
    """The mean squared error over the hidden patches."""
    return (predicted - patches)[hidden].square().mean()
