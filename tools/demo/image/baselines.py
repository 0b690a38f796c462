"""What the image demo's losses are to be compared with: guesses that need no training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dilkit.tools.demo.image.model import hidden_loss

Weights = Callable[[Tensor], Tensor]
"""From squared distances in patches to weights; of a hidden patch the distance is infinite."""

GUESSES: dict[str, Weights] = {
    "mean": lambda squares: squares.isfinite().float(),
    "nearest": lambda squares: (squares == squares.amin(-1, keepdim=True)).float(),
    "weighted": lambda squares: squares**-2,
}
"""The mean of the visible patches; the nearest visible patch (the mean of the nearest); all by 1 / distance^4."""


def baselines(patches: Tensor, hidden: Tensor, grid: int) -> dict[str, float]:
    """The loss of each guess on the crops `(n, cells, values)`, of which `hidden` `(n, cells)` is to be guessed."""
    rows, columns = torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="ij")
    places = torch.stack([rows, columns], -1).flatten(0, 1).float()
    squares = (places[:, None] - places).square().sum(-1)
    far = [squares.masked_fill(one, torch.inf) for one in hidden]
    return {name: _loss(patches, hidden, [weigh(one) for one in far]) for name, weigh in GUESSES.items()}


def _loss(patches: Tensor, hidden: Tensor, weights: list[Tensor]) -> float:
    guessed = []
    for crop, one, weight in zip(patches, hidden, weights, strict=True):
        guess = crop.clone()
        guess[one] = weight[one] @ crop / weight[one].sum(-1, keepdim=True)
        guessed.append(guess)
    return hidden_loss(torch.stack(guessed), patches, hidden).item()
