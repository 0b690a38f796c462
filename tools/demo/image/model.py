"""The image demo's model: a transformer over the patches of a picture, some of them hidden, that predicts the hidden ones."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dilkit import DilatedAttention, MultiheadDilatedAttention, Pattern, Problem
from dilkit.device import probe
from dilkit.orders.token_order import TokenOrder, order
from dilkit.tools.demo.text.model import SquaredReLU

CURVES = ("row-major", "hilbert")
"""The orders that are compared."""


PATTERN = Pattern([64, 256, 1024], [1, 2, 4])
"""Of 1,024 tokens: 64 whole, 1 in 2 of 256, 1 in 4 of them all."""


@dataclass(frozen=True)
class ImageConfig:
    """Sizes of the model and of its task: squares of `grid` x `grid` patches of `patch` x `patch` pixels."""

    grid: int = 32
    patch: int = 4
    hidden: float = 0.75
    """The share of the patches that is hidden."""
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
    def values(self) -> int:
        """Numbers in a patch."""
        return 3 * self.patch**2

    def order(self, curve: str) -> TokenOrder:
        """The order of the tokens along `curve`."""
        return order((self.grid, self.grid), curve)

    def problem(self, batch: int) -> Problem:
        """The attention problem that every layer poses in training."""
        sizes: Any = dict(seq=self.cells, heads=self.heads, head_dim=self.width // self.heads, batch=batch)
        return Problem(pattern=self.pattern, device=probe("cpu"), requires_grad=True, **sizes)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return dataclasses.asdict(self) | dict(pattern=str(self.pattern))


class AxialRotary(nn.Module):
    """An inner attention whose queries and keys are turned by their row and by their column, half of the pairs each.

    Scores then depend on the distance in the picture, down and across, whatever the order of the tokens.
    """

    def __init__(self, inner: nn.Module, grid: int, head_dim: int) -> None:
        super().__init__()
        self.inner = inner
        pairs = head_dim // 4
        speeds = torch.logspace(0, math.log10(math.pi / grid), pairs)  # of a turn: from one patch to the whole side
        rows, columns = torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="ij")
        angles = torch.cat([place.flatten()[:, None] * speeds for place in (rows, columns)], dim=1)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles)[:, None], persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return self.inner(self._turned(query), self._turned(key), value, **options)

    def _turned(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self.turns).flatten(-2)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ImageConfig, token_order: TokenOrder) -> None:
        super().__init__()
        width = config.width
        inner = AxialRotary(DilatedAttention(config.pattern, order=token_order), config.grid, width // config.heads)
        self.attention_norm = nn.LayerNorm(width)
        self.attention = MultiheadDilatedAttention(width, config.heads, inner)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), SquaredReLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))[0]
        return x + self.mlp(self.mlp_norm(x))


class PatchTransformer(nn.Module):
    """All patches of crops, from those that are visible: `(n, cells, values)` and bool `(n, cells)`, True = hidden.

    What is hidden is not read. Values count from the mean colour of what is visible in their crop: so does the prediction.
    """

    def __init__(self, config: ImageConfig, token_order: TokenOrder) -> None:
        super().__init__()
        self.embedding = nn.Linear(config.values + 1, config.width)
        self.blocks = nn.ModuleList(Block(config, token_order) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.values)
        self._reset_parameters(config)

    @torch.no_grad()
    def _reset_parameters(self, config: ImageConfig) -> None:
        """Begin by predicting the mean colour, with small updates, each patch looking around itself.

        The constant that all queries and keys have in common is turned like them, and so favours what is near.
        """
        nn.init.zeros_(self.head.weight)
        for block in self.blocks:
            block.attention.in_proj_bias[: 2 * config.width] = 1.0
            for linear in (block.attention.out_proj, block.mlp[-1]):
                linear.weight.mul_(1 / math.sqrt(2 * config.layers))

    def forward(self, patches: Tensor, hidden: Tensor) -> Tensor:
        base = mean_colour(patches, hidden)
        visible = (patches - base).masked_fill(hidden[..., None], 0.0)
        x = self.embedding(torch.cat([visible, hidden[..., None].to(visible.dtype)], dim=-1))
        for block in self.blocks:
            x = block(x)
        return base + self.head(self.norm(x))


def mean_colour(patches: Tensor, hidden: Tensor) -> Tensor:
    """The mean colour of each crop's visible patches, as a patch of that colour, `(n, 1, values)`."""
    seen = (~hidden[..., None]).to(patches.dtype)
    mean = (patches * seen).sum(1) / seen.sum(1)
    colour = mean.unflatten(-1, (-1, 3)).mean(1)
    return colour.repeat(1, patches.shape[-1] // 3)[:, None]


def hidden_loss(predicted: Tensor, patches: Tensor, hidden: Tensor) -> Tensor:
    """The mean squared error over the hidden patches."""
    return (predicted - patches)[hidden].square().mean()
