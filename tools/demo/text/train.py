"""How the demo trains: AdamW, short windows first, all scheduled by the share of the budget spent, so that it ends on time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dilkit.tools.demo.text.model import ByteTransformer
from dilkit.tools.demo.text.ranks import Alone, Ranks

Point = tuple[float, int, float]
"""(seconds of training, bytes trained on, bits per byte)."""

EVALUATION_WINDOWS = 8
CURVE_POINTS = 8
"""How often the held-out windows are judged in the course of a training, besides before it."""
PEAK_RATE, FINAL_SHARE = 3e-3, 0.05
WARM_UP = 0.03
SHORT_WINDOW, SHORT_SHARE = 512, 0.75
"""For this share of the budget windows are short: the model takes many more steps, and learns what is near before what is far."""


@dataclass(frozen=True)
class Budget:
    """When training ends: after `steps` steps, or else after `seconds` seconds of it."""

    seconds: float | None = None
    steps: int | None = None

    def spent(self, seconds: float, steps: int) -> float:
        """The share that is spent, from 0 to 1."""
        share = steps / self.steps if self.steps else seconds / (self.seconds or 1.0)
        return min(share, 1.0)


@dataclass
class Progress:
    """The course of a training so far. `seconds` are those of training alone, without the evaluations."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    train: list[Point] = field(default_factory=list)
    """One point a step: its loss, before the update."""
    held_out: list[Point] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Training speed in bytes a second; 0 before the first step."""
        return self.tokens / self.seconds if self.steps else 0.0

    def recent_loss(self, steps: int = 20) -> float:
        """The mean training loss of the last `steps` steps in bits per byte."""
        recent = [loss for *_, loss in self.train[-steps:]]
        return sum(recent) / len(recent)


def as_tensor(text: bytes) -> Tensor:
    """The bytes as a uint8 tensor."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def held_out_windows(text: bytes, context: int) -> Tensor:
    """Windows evenly spread over `text`, `(windows, context + 1)`: as many as fit without overlap, at most 8."""
    data, size = as_tensor(text), context + 1
    count = min(EVALUATION_WINDOWS, len(data) // size)
    starts = [i * (len(data) - size) // max(count - 1, 1) for i in range(count)]
    return torch.stack([data[start : start + size] for start in starts])


class Trainer:
    """Trains `model` on random windows of `text` for `budget`; `progress` is its course, always up to date.

    Over `ranks`, each of them trains on its part of every window, and all have the same progress.
    """

    def __init__(
        self, model: ByteTransformer, text: bytes, held_out: Tensor, budget: Budget, seed: int, ranks: Ranks | None = None
    ) -> None:
        self.model, self.budget = model, budget
        self.ranks = ranks or Ranks(Alone(), model.config)
        self.text, self.held_out = as_tensor(text), self.ranks.part(held_out)
        self.progress = Progress()
        self._generator = torch.Generator().manual_seed(seed)
        self._optimizer = _optimizer(model)

    @property
    def spent(self) -> float:
        """The share of the budget that is spent, from 0 to 1."""
        return self.budget.spent(self.progress.seconds, self.progress.steps)

    def run(self, after_step: Callable[[], Any], after_evaluation: Callable[[], Any]) -> None:
        """Judge, then train and judge in turns until the budget is spent."""
        for part in range(CURVE_POINTS + 1):
            while self.spent < part / CURVE_POINTS:
                self.step()
                after_step()
            if part == 0 or self.progress.tokens > self.progress.held_out[-1][1]:
                point = (self.progress.seconds, self.progress.tokens, self._evaluate())
                self.progress.held_out.append(point)
                after_evaluation()

    def step(self) -> None:
        """One step of training, on one window."""
        started, before = time.perf_counter(), (self.progress.seconds, self.progress.tokens)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.spent)
        seq = self._short_window if self.spent < SHORT_SHARE else self.model.config.context
        self._optimizer.zero_grad()
        loss = self.ranks.backward(self.model, self._window(seq), seq)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self.progress.train.append((*before, loss))
        self.progress.steps += 1
        self.progress.tokens += seq
        self._meet(time.perf_counter() - started)

    def points(self) -> list[dict[str, Any]]:
        """The evaluations so far, each with the mean training loss since the one before (None where there was no step)."""
        points, done = [], 0
        for seconds, tokens, bits in self.progress.held_out:
            losses = [loss for _, seen, loss in self.progress.train if done <= seen < tokens]
            mean = sum(losses) / len(losses) if losses else None
            points.append(dict(seconds=seconds, tokens=tokens, train=mean, held_out=bits))
            done = tokens
        return points

    def to_dict(self) -> dict[str, Any]:
        """As plain data; `after` is the last evaluation there is."""
        progress, judged = self.progress, [bits for *_, bits in self.progress.held_out]
        ends = dict(before=judged[0] if judged else None, after=judged[-1] if len(judged) > 1 else None)
        sums = dict(
            steps=progress.steps, tokens=progress.tokens, seconds=progress.seconds, tokens_per_second=progress.tokens_per_second
        )
        windows = dict(held_out_windows=len(self.held_out), window_bytes=self.model.config.context)
        curriculum = dict(short_window_bytes=self._short_window, short_window_share=SHORT_SHARE)
        curves = dict(points=self.points(), train_curve=[list(point) for point in progress.train])
        return dict(**ends, **sums, **windows, **curriculum, budget=asdict(self.budget), **curves)

    @property
    def _short_window(self) -> int:
        return min(SHORT_WINDOW, self.model.config.context)

    def _window(self, seq: int) -> Tensor:
        """A random window of `seq` bytes of the text, as far as it is this rank's: `(1, rows + 1)`."""
        first = int(torch.randint(len(self.text) - seq, (), generator=self._generator))
        start, stop = self.ranks.rows(seq)
        return self.text[None, first + start : first + stop + 1]

    @torch.no_grad()
    def _evaluate(self) -> float:
        """Mean bits per byte over the held-out windows, one at a time."""
        bits = 0.0
        for window in self.held_out:
            bits += self.model.bits_per_byte(window[None]).item() * self.ranks.share(self.model.config.context)
            self._meet()
        return self.ranks.sum(bits) / len(self.held_out)

    def _meet(self, seconds: float = 0.0) -> None:
        """Add `seconds` of training, as rank 0 has measured them; be interrupted if any rank is."""
        seconds, stop = self.ranks.meet(seconds)
        self.progress.seconds += seconds
        if stop:
            raise KeyboardInterrupt


def learning_rate(spent: float) -> float:
    """Linear warm-up, then a cosine down to a twentieth, by the share of the budget spent."""
    cosine = 0.5 * (1 + math.cos(math.pi * spent))
    return PEAK_RATE * min(1.0, (spent + 1e-3) / WARM_UP) * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)


def _optimizer(model: ByteTransformer) -> torch.optim.Optimizer:
    """AdamW; matrices decay, embeddings, biases and norms do not."""
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and not name.startswith("embedding")]
    others = [p for name, p in model.named_parameters() if p.dim() <= 1 or name.startswith("embedding")]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
