"""The image demo's model: a transformer over the patches of a picture, some of them hidden, that predicts the hidden ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dilkit import DilatedAttention, Pattern, Problem
from dilkit.device import probe
from dilkit.orders.token_order import TokenOrder, order
from dilkit.tools.demo.block import Block, scale_updates
from dilkit.tools.results.kinds.demo_image import CURVES, ImageModel

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

    def order(self, curve: str) -> TokenOrder:
        """The order of the tokens along `curve`."""
        return order((self.grid, self.grid), curve)

    def problem(self, batch: int) -> Problem:
        """The attention problem that every layer poses in training."""
        sizes: Any = dict(seq=self.cells, heads=self.heads, head_dim=self.width // self.heads, batch=batch)
        return Problem(pattern=self.pattern, device=probe("cpu"), requires_grad=True, **sizes)

    def facts(self, batch: int) -> ImageModel:
        """The sizes, with `batch` crops in a step."""
        problem, model = self.problem(batch), PatchTransformer(self, self.order(CURVES[0]))
        return ImageModel(
            **{**vars(self), "pattern": str(self.pattern)},
            parameters=sum(p.numel() for p in model.parameters()),
            cells=self.cells,
            dtype=problem.dtype,
            share_of_dense=problem.flops() / replace(problem, pattern=Pattern.dense()).flops(),
        )


class AxialRotary(nn.Module):
    """An inner attention with rotary embeddings of the row in half of the pairs, of the column in the other half.

    Scores then depend on the distance in the picture, down and across, whatever the order of the tokens.
    """

    rotations: Tensor

    def __init__(self, config: ImageConfig, token_order: TokenOrder) -> None:
        super().__init__()
        self.inner = DilatedAttention(config.pattern, order=token_order)
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

    What is hidden is not read. The model predicts differences from the mean colour of what is visible, at first none. Queries and
    keys begin with a constant in common: rotated like them, it favours patches that are near.
    """

    def __init__(self, config: ImageConfig, token_order: TokenOrder) -> None:
        super().__init__()
        values = 3 * config.patch**2
        self.embedding = nn.Linear(values + 1, config.width)
        blocks = [Block(config.width, config.heads, AxialRotary(config, token_order)) for _ in range(config.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, values)
        nn.init.zeros_(self.head.weight)
        scale_updates(blocks, 1.0)
        for block in blocks:
            if block.attention.in_proj_bias is not None:
                nn.init.ones_(block.attention.in_proj_bias[: 2 * config.width])

    def forward(self, patches: Tensor, hidden: Tensor) -> Tensor:
        base = mean_colour(patches, hidden)
        visible = (patches - base).masked_fill(hidden[..., None], 0.0)
        x = self.embedding(torch.cat([visible, hidden[..., None].to(visible.dtype)], dim=-1))
        for block in self.blocks:
            x = block(x)
        predicted: Tensor = base + self.head(self.norm(x))
        return predicted


def mean_colour(patches: Tensor, hidden: Tensor) -> Tensor:
    """The mean colour of each crop's visible patches, as a patch of that colour, `(n, 1, values)`."""
    seen = (~hidden[..., None]).to(patches.dtype)
    mean = (patches * seen).sum(1) / seen.sum(1)
    colour = torch.unflatten(mean, -1, (-1, 3)).mean(1)
    return colour.repeat(1, patches.shape[-1] // 3)[:, None]


def hidden_loss(predicted: Tensor, patches: Tensor, hidden: Tensor) -> Tensor:
    """The mean squared error over the hidden patches."""
    return (predicted - patches)[hidden].square().mean()
