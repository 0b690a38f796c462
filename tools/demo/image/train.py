"""How the image demo trains: for each seed two models that differ in nothing but the order of their tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dilkit.tools.demo.image.baselines import baselines
from dilkit.tools.demo.image.model import CURVES, ImageConfig, PatchTransformer, hidden_loss
from dilkit.tools.demo.image.photo import Photograph, to_patches, to_pixels

BATCH = 2
"""Crops in a step."""
MASKS = 3
"""How many times each held-out crop is judged, other patches being hidden each time."""
CURVE_POINTS = 4
"""How often a training is judged in its course, besides before it."""
PEAK_RATE, FINAL_SHARE, WARM_UP = 3e-3, 0.02, 0.05
_JUDGED_SEED = 0
"""All seeds of a training are judged on the same."""


class Task:
    """What is learnt and judged: crops of a photograph as patches, standardised by what is trained on; loss 1 is its variance."""

    def __init__(self, photo: Photograph, config: ImageConfig) -> None:
        self.photo, self.config = photo, config
        seen = photo.train_pixels()
        self.mean, self.deviation = seen.mean(0), (seen - seen.mean(0)).square().mean().sqrt().item()
        generator = torch.Generator().manual_seed(_JUDGED_SEED)
        self.held_out = self.patches(photo.held_out_crops()).repeat(MASKS, 1, 1)
        self.hidden = self.hide(len(self.held_out), generator)

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

    def baselines(self) -> dict[str, float]:
        """The losses of untrained guesses on what is judged."""
        return baselines(self.held_out, self.hidden, self.config.grid)

    def decibels(self, loss: float) -> float:
        """Peak signal-to-noise ratio of the hidden pixels."""
        return -10 * math.log10(loss * self.deviation**2)


class Twins:
    """Two models with the same initial weights, one an order, trained in step on the same crops with the same patches hidden."""

    def __init__(self, task: Task, steps: int, seed: int) -> None:
        self.task, self.steps, self.seed, self.done = task, steps, seed, 0
        self.models = {curve: self._new_model(curve) for curve in CURVES}
        self.train: dict[str, list[float]] = {curve: [] for curve in CURVES}
        self.seconds = dict.fromkeys(CURVES, 0.0)
        self.points: list[dict[str, Any]] = []
        self._generator = torch.Generator().manual_seed(seed)
        self._optimizers = {curve: _optimizer(model) for curve, model in self.models.items()}

    def _new_model(self, curve: str) -> PatchTransformer:
        torch.manual_seed(self.seed)
        return PatchTransformer(self.task.config, self.task.config.order(curve))

    @property
    def finished(self) -> bool:
        """Whether the training has come to its end and been judged there."""
        return bool(self.points) and self.points[-1]["step"] == self.steps

    def run(self, after_step: Callable[[], Any], after_evaluation: Callable[[], Any]) -> None:
        """Judge, then train and judge in turns until all steps are done."""
        for part in range(CURVE_POINTS + 1):
            while self.done < part * self.steps // CURVE_POINTS:
                self.step()
                after_step()
            if part == 0 or self.done > self.points[-1]["step"]:
                self.points.append(dict(step=self.done, held_out={curve: self._judge(curve) for curve in CURVES}))
                after_evaluation()

    def step(self) -> None:
        """One step of both."""
        patches, hidden = self.task.batch(self._generator)
        losses = {curve: self._step(curve, patches, hidden) for curve in CURVES}
        for curve, loss in losses.items():
            self.train[curve].append(loss)
        self.done += 1

    def _step(self, curve: str, patches: Tensor, hidden: Tensor) -> float:
        started, model, optimizer = time.perf_counter(), self.models[curve], self._optimizers[curve]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(self.done / self.steps)
        optimizer.zero_grad()
        loss = hidden_loss(model(patches, hidden), patches, hidden)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        self.seconds[curve] += time.perf_counter() - started
        return loss.item()

    @torch.no_grad()
    def predict(self, curve: str, patches: Tensor, hidden: Tensor) -> Tensor:
        """What the model of `curve` makes of crops, a few at a time."""
        parts = zip(patches.split(4), hidden.split(4), strict=True)
        return torch.cat([self.models[curve](crops, one) for crops, one in parts])

    def _judge(self, curve: str) -> float:
        task = self.task
        return hidden_loss(self.predict(curve, task.held_out, task.hidden), task.held_out, task.hidden).item()

    def recent_loss(self, curve: str, steps: int = 20) -> float:
        """The mean training loss of the last `steps` steps."""
        recent = self.train[curve][-steps:]
        return sum(recent) / len(recent)

    def to_dict(self) -> dict[str, Any]:
        """The course of both trainings so far, as plain data."""
        return dict(
            seed=self.seed, steps=self.done, finished=self.finished, points=self.points, train=self.train, seconds=self.seconds
        )


def learning_rate(spent: float) -> float:
    """Linear warm-up, then a cosine down to a fiftieth, by the share of the steps that are done."""
    cosine = 0.5 * (1 + math.cos(math.pi * spent))
    return PEAK_RATE * min(1.0, (spent + 1e-3) / WARM_UP) * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05, fused=True)
