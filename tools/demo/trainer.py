"""How the demos train: AdamW, all scheduled by the share of the budget that is spent, judged now and then on what is held out."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor, nn, optim

from dilkit.tools.results.kinds.demo import Budget

L = TypeVar("L")
PEAK_RATE = 3e-3


@dataclass(frozen=True)
class Point(Generic[L]):
    """A loss in the course of a training: after how many seconds, steps and tokens."""

    seconds: float
    steps: int
    tokens: int
    loss: L


class Task(ABC, Generic[L]):
    """A model and what it learns; a loss is of type L."""

    model: nn.Module

    @abstractmethod
    def backward(self, spent: float) -> tuple[L, int]:
        """The loss on the next batch, and its tokens; the parameters have clipped gradients. `spent` is a share of the budget."""

    @abstractmethod
    def judge(self) -> L:
        """The loss on what is held out."""

    def clock(self, seconds: float) -> tuple[float, bool]:
        """The seconds that a step took for all who train together, and whether one of them was interrupted."""
        return seconds, False


@dataclass(frozen=True)
class Recipe:
    """Linear warm-up to `PEAK_RATE`, then a cosine down to a share of it, all by share of the budget; decay of what `decays`."""

    warm_up: float
    final_share: float
    weight_decay: float
    decays: Callable[[str, Tensor], bool] = lambda name, parameter: True

    def rate(self, spent: float) -> float:
        """The learning rate when this share of the budget is spent."""
        cosine = 0.5 * (1 + math.cos(math.pi * spent))
        return PEAK_RATE * min(1.0, (spent + 1e-3) / self.warm_up) * (self.final_share + (1 - self.final_share) * cosine)

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        """AdamW."""
        named = [*model.named_parameters()]
        groups: list[dict[str, Any]] = [
            dict(params=[p for name, p in named if self.decays(name, p) is wants], weight_decay=self.weight_decay * wants)
            for wants in (True, False)
        ]
        return optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


class Trainer(Generic[L]):
    """Trains a task for a budget. What it says of the training is always up to date.

    `seconds` are those of training alone, without the judgements. `train` has one point a step: its loss, before the update.
    """

    def __init__(self, task: Task[L], budget: Budget, recipe: Recipe) -> None:
        self.task, self.budget, self.recipe = task, budget, recipe
        self.seconds, self.steps, self.tokens = 0.0, 0, 0
        self.train: list[Point[L]] = []
        self.held_out: list[Point[L]] = []
        self._optimizer = recipe.optimizer(task.model)

    @property
    def spent(self) -> float:
        """The share of the budget that is spent, from 0 to 1."""
        return self.budget.spent(self.seconds, self.steps)

    def run(self, parts: int, after_step: Callable[[], Any], after_judgement: Callable[[], Any]) -> None:
        """Judge, then train and judge in turns, so many times, until the budget is spent."""
        for part in range(parts + 1):
            while self.spent < part / parts:
                self.step()
                after_step()
            if part == 0 or self.steps > self.held_out[-1].steps:
                self.held_out.append(self._point(self.task.judge()))
                after_judgement()

    def step(self) -> None:
        """One step of training, on one batch. Raises KeyboardInterrupt where another rank was interrupted."""
        started = time.perf_counter()
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.spent)
        self._optimizer.zero_grad()
        loss, tokens = self.task.backward(self.spent)
        self._optimizer.step()
        self.train.append(self._point(loss))
        self.steps += 1
        self.tokens += tokens
        seconds, stop = self.task.clock(time.perf_counter() - started)
        self.seconds += seconds
        if stop:
            raise KeyboardInterrupt

    def _point(self, loss: L) -> Point[L]:
        return Point(self.seconds, self.steps, self.tokens, loss)
