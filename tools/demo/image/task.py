"""What the image demo's models learn: to fill in the hidden patches of random crops; and guesses that need no training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dilkit.tools.demo.image.model import ImageConfig, PatchTransformer, hidden_loss
from dilkit.tools.demo.image.photo import Photograph, to_patches, to_pixels
from dilkit.tools.demo.trainer import Recipe, Task
from dilkit.tools.results.kinds.demo_image import CURVES, Guess

BATCH = 2
"""Crops in a step."""
MASKS = 3
"""How many times each held-out crop is judged, other patches being hidden each time."""
JUDGEMENTS = 4
"""How often a training is judged in its course, besides before it."""
RECIPE = Recipe(0.05, 0.02, 0.05)
_JUDGED_SEED = 0
"""All seeds of a training are judged on the same."""

GUESSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda squares: squares.isfinite().float(),
    "nearest": lambda squares: (squares == squares.amin(-1, keepdim=True)).float(),
    "weighted": lambda squares: squares**-2,
}
"""From squared distances in patches, infinite for hidden ones, to weights: of the mean of the visible patches; of the nearest one
(the mean of the nearest); of all by 1 / distance^4."""


class Crops:
    """Crops of a photograph as patches, standardised by what is trained on: a loss of 1 is the variance of that."""

    def __init__(self, photo: Photograph, config: ImageConfig) -> None:
        self.photo, self.config = photo, config
        seen = photo.train_pixels()
        self.mean, self.deviation = seen.mean(0), (seen - seen.mean(0)).square().mean().sqrt().item()
        self.held_out = self.patches(photo.held_out_crops()).repeat(MASKS, 1, 1)
        self.hidden = self.hide(len(self.held_out), torch.Generator().manual_seed(_JUDGED_SEED))

    def patches(self, crops: Tensor) -> Tensor:
        """`(n, side, side, 3)`, 0 to 1 -> `(n, cells, values)`, standardised."""
        return to_patches((crops - self.mean) / self.deviation, self.config.patch)

    def pixels(self, patches: Tensor) -> Tensor:
        """The inverse of `patches`, cut to 0 to 1."""
        return (to_pixels(patches, self.config.patch) * self.deviation + self.mean).clamp(0, 1)

    def hide(self, crops: int, generator: torch.Generator) -> Tensor:
        """Which patches are hidden, bool `(crops, cells)`: as many in each crop, anywhere."""
        order = torch.rand(crops, self.config.cells, generator=generator).argsort(1)
        return order < round(self.config.hidden * self.config.cells)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random crops to train on and what is hidden in them: `(BATCH, cells, values)` and `(BATCH, cells)`."""
        crops = torch.stack([self.photo.random_crop(generator) for _ in range(BATCH)])
        return self.patches(crops), self.hide(BATCH, generator)

    def decibels(self, loss: float) -> float:
        """Peak signal-to-noise ratio of the hidden pixels."""
        return -10 * math.log10(loss * self.deviation**2)

    def guesses(self) -> dict[str, Guess]:
        """What each of the `GUESSES` loses on what is held out."""
        losses = {name: guess_loss(weigh, self.held_out, self.hidden, self.config.places) for name, weigh in GUESSES.items()}
        return {name: Guess(loss, self.decibels(loss)) for name, loss in losses.items()}


def guess_loss(weigh: Callable[[Tensor], Tensor], patches: Tensor, hidden: Tensor, places: Tensor) -> float:
    """The loss of weighted means of the visible patches of crops `(n, cells, values)`; `hidden`: `(n, cells)`."""
    squares = (places[:, None] - places).square().sum(-1).float()
    guessed = patches.clone()
    for guess, crop, one in zip(guessed, patches, hidden, strict=True):
        weight = weigh(squares.masked_fill(one, torch.inf))[one]
        guess[one] = weight @ crop / weight.sum(-1, keepdim=True)
    return hidden_loss(guessed, patches, hidden).item()


class PairTask(Task[dict[str, float]]):
    """The hidden patches of crops, for two models with the same weights at first, the same crops and the same patches hidden.

    They differ in the order of their tokens, by which losses, models and the `seconds` of their steps are named.
    """

    def __init__(self, crops: Crops, seed: int) -> None:
        self.crops, self.seconds = crops, dict.fromkeys(CURVES, 0.0)
        self.models = {curve: self._model(curve, seed) for curve in CURVES}
        self.model = nn.ModuleDict(self.models)
        self._generator = torch.Generator().manual_seed(seed)

    def _model(self, curve: str, seed: int) -> PatchTransformer:
        torch.manual_seed(seed)
        return PatchTransformer(self.crops.config, self.crops.config.order(curve))

    def backward(self, spent: float) -> tuple[dict[str, float], int]:
        patches, hidden = self.crops.batch(self._generator)
        return {curve: self._backward(curve, patches, hidden) for curve in CURVES}, hidden.numel()

    def _backward(self, curve: str, patches: Tensor, hidden: Tensor) -> float:
        started, model = time.perf_counter(), self.models[curve]
        loss = hidden_loss(model(patches, hidden), patches, hidden)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.seconds[curve] += time.perf_counter() - started
        return loss.item()

    def judge(self) -> dict[str, float]:
        patches, hidden = self.crops.held_out, self.crops.hidden
        return {curve: hidden_loss(self.predict(curve, patches, hidden), patches, hidden).item() for curve in CURVES}

    @torch.no_grad()
    def predict(self, curve: str, patches: Tensor, hidden: Tensor) -> Tensor:
        """What a model makes of crops, a few at a time."""
        parts = zip(torch.split(patches, 4), torch.split(hidden, 4), strict=True)
        return torch.cat([self.models[curve](some, one) for some, one in parts])
