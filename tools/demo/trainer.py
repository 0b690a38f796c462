"""How the demos train: AdamW, all scheduled by the share of the budget that is spent, judged now and then on what is held out."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor, nn, optim

from dilkit.tools.results.kinds.demo import Budget

PEAK_RATE = 3e-3


class Point(NamedTuple):
    """A loss in the course of a training: after how many seconds, steps and tokens."""

    seconds: float
    steps: int
    tokens: int
    loss: float


@dataclass
class Progress:
    """The course of a training so far. `seconds` are those of training alone, without the judgements."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    train: list[Point] = field(default_factory=list)
    """One point a step: its loss, before the update."""
    held_out: list[Point] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Training speed; 0 before the first step."""
        return self.tokens / self.seconds if self.steps else 0.0

    def recent_loss(self, steps: int = 20) -> float:
        """The mean training loss of the last `steps` steps."""
        recent = [point.loss for point in self.train[-steps:]]
        return sum(recent) / len(recent)

    def point(self, loss: float) -> Point:
        """A loss at this moment."""
        return Point(self.seconds, self.steps, self.tokens, loss)


class Task(ABC):
    """A model and what it learns."""

    model: nn.Module

    @abstractmethod
    def backward(self, spent: float) -> tuple[float, int]:
        """The loss on the next batch, and its tokens; the parameters have its gradients. `spent` is a share of the budget."""

    @abstractmethod
    def judge(self) -> float:
        """The loss on what is held out."""

    def clock(self, seconds: float) -> tuple[float, bool]:
        """The seconds that a step took for all who train together, and whether one of them was interrupted."""
        return seconds, False


T = TypeVar("T", bound=Task)


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


class Trainer(Generic[T]):
    """Trains a task for a budget; `progress` is its course, always up to date."""

    def __init__(self, task: T, budget: Budget, recipe: Recipe) -> None:
        self.task, self.budget, self.recipe, self.progress = task, budget, recipe, Progress()
        self._optimizer = recipe.optimizer(task.model)

    @property
    def spent(self) -> float:
        """The share of the budget that is spent, from 0 to 1."""
        return self.budget.spent(self.progress.seconds, self.progress.steps)

    def step(self) -> None:
        """One step of training, on one batch. Raises KeyboardInterrupt where another rank was interrupted."""
        started, progress = time.perf_counter(), self.progress
        before = progress.point(0.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.spent)
        self._optimizer.zero_grad()
        loss, tokens = self.task.backward(self.spent)
        nn.utils.clip_grad_norm_(self.task.model.parameters(), 1.0)
        self._optimizer.step()
        progress.train.append(before._replace(loss=loss))
        progress.steps += 1
        progress.tokens += tokens
        seconds, stop = self.task.clock(time.perf_counter() - started)
        progress.seconds += seconds
        if stop:
            raise KeyboardInterrupt

    def judge(self) -> None:
        """Add the loss on what is held out."""
        self.progress.held_out.append(self.progress.point(self.task.judge()))


def train(
    trainers: Sequence[Trainer[Any]], parts: int, after_step: Callable[[], Any], after_judgement: Callable[[], Any]
) -> None:
    """Judge all, then train all in step until the budget of the first is spent, judging after each of so many parts of it."""
    first = trainers[0]
    for part in range(parts + 1):
        while first.spent < part / parts:
            for trainer in trainers:
                trainer.step()
            after_step()
        if part == 0 or first.progress.steps > first.progress.held_out[-1].steps:
            for trainer in trainers:
                trainer.judge()
            after_judgement()
