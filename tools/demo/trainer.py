"""How the demos train: AdamW, scheduled by the share of the budget that is spent, judged now and then on what is held out."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from statistics import fmean
from typing import Any, TypeVar

from torch import nn, optim

from dilkit.tools.demo.text.record import Budget, Evaluation, Training

T = TypeVar("T", bound=Training)
PEAK_RATE, FINAL_SHARE, WARM_UP = 3e-3, 0.05, 0.03
"""The learning rate grows over a share `WARM_UP` of the budget, then falls along a cosine to `FINAL_SHARE` of its peak."""
WEIGHT_DECAY = 0.1
"""Of matrices: embeddings, biases and norms do not decay."""


class Task(ABC):
    """A model and what it learns."""

    model: nn.Module

    @abstractmethod
    def backward(self, spent: float) -> tuple[float, int]:
        """The loss on the next batch, and its tokens; the parameters have gradients. `spent` is a share of the budget."""

    @abstractmethod
    def judge(self) -> float:
        """The loss on what is held out."""

    def clock(self, seconds: float) -> tuple[float, bool]:
        """The seconds that a step took for all who train together, and whether one of them was interrupted."""
        return seconds, False


class Trainer:
    """Trains a task for a budget. What it says of the training is always up to date.

    `seconds` are those of training alone, without the judgements. `curve` has one point a step: its loss, before the update.
    """

    def __init__(self, task: Task, budget: Budget) -> None:
        self.task, self.budget = task, budget
        self.seconds, self.tokens = 0.0, 0
        self.points: list[Evaluation] = []
        self.curve: list[tuple[float, int, float]] = []
        self._optimizer = _optimizer(task.model)

    @property
    def spent(self) -> float:
        """The share of the budget that is spent, from 0 to 1."""
        return self.budget.spent(self.seconds, len(self.curve))

    def run(self, judgements: int, after_step: Callable[[], Any], after_judgement: Callable[[], Any]) -> None:
        """Judge, then train and judge in turns, so many times, until the budget is spent."""
        for part in range(judgements + 1):
            done = len(self.curve)
            while self.spent < part / judgements:
                self.step()
                after_step()
            losses = [loss for *_, loss in self.curve[done:]]
            if losses or part == 0:
                train = fmean(losses) if losses else None
                self.points.append(Evaluation(self.seconds, self.tokens, train, self.task.judge()))
                after_judgement()

    def step(self) -> None:
        """One step of training, on one batch. Raises KeyboardInterrupt where another rank was interrupted."""
        started = time.perf_counter()
        for group in self._optimizer.param_groups:
            group["lr"] = _rate(self.spent)
        self._optimizer.zero_grad()
        loss, tokens = self.task.backward(self.spent)
        nn.utils.clip_grad_norm_(self.task.model.parameters(), 1.0)
        self._optimizer.step()
        self.curve.append((self.seconds, self.tokens, loss))
        self.tokens += tokens
        seconds, stop = self.task.clock(time.perf_counter() - started)
        self.seconds += seconds
        if stop:
            raise KeyboardInterrupt

    def record(self, kind: type[T], **more: Any) -> T:
        """The course of the training so far."""
        return kind(
            budget=self.budget,
            steps=len(self.curve),
            tokens=self.tokens,
            seconds=self.seconds,
            points=tuple(self.points),
            train_curve=tuple(self.curve),
            **more,
        )


def _rate(spent: float) -> float:
    """The learning rate when this share of the budget is spent."""
    cosine = 0.5 * (1 + math.cos(math.pi * spent))
    return PEAK_RATE * min(1.0, (spent + 1e-3) / WARM_UP) * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)


def _optimizer(model: nn.Module) -> optim.Optimizer:
    decays = {name: p.dim() > 1 and not name.startswith("embedding") for name, p in model.named_parameters()}
    groups: list[dict[str, Any]] = [
        dict(params=[p for name, p in model.named_parameters() if decays[name] is wants], weight_decay=WEIGHT_DECAY * wants)
        for wants in (True, False)
    ]
    return optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
