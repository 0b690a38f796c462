"""Training and reporting for all demos: a schedule, a progress bar, and a report at the end, which Ctrl-C brings at any point."""

from __future__ import annotations

import argparse
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor, nn, optim
from tqdm import tqdm

from dilkit import Pattern, Problem, explain
from dilkit.device import probe
from dilkit.tools.console.arguments import make_folder
from dilkit.tools.console.interrupt import INTERRUPTED
from dilkit.tools.report import document
from dilkit.tools.report.files import publish
from dilkit.tools.report.views import fact
from dilkit.tools.results.file import new_result, write_result
from dilkit.tools.results.rows import Row, RowsResult

PEAK_RATE, FINAL_SHARE, WARM_UP, WEIGHT_DECAY = 3e-3, 0.05, 0.03, 0.1
"""The learning rate grows over a share `WARM_UP` of the budget, then falls along a cosine to `FINAL_SHARE` of its peak."""
SAMPLES = 5
"""Samples of each call that a demo times."""
BAR = "{percentage:5.0f} % |{bar:30}| {desc}"


class Task(ABC):
    """A model and its training data."""

    model: nn.Module

    @abstractmethod
    def batch(self, spent: float) -> tuple[Tensor, int]:
        """Return the loss of the next batch, and its tokens. `spent` is a share of the budget."""

    def differentiate(self, loss: Tensor) -> float:
        """Set the gradients of a loss; return it as a number."""
        torch.autograd.backward(loss)
        return loss.item()

    def backward(self, spent: float) -> tuple[float, int]:
        """Set the gradients of the next batch; return its loss and its tokens."""
        loss, tokens = self.batch(spent)
        return self.differentiate(loss), tokens

    @abstractmethod
    def judge(self) -> float:
        """Return the loss on held-out data."""

    def clock(self, seconds: float) -> tuple[float, bool]:
        """Return the seconds of a step for all ranks that train together, and True if one of them was interrupted."""
        return seconds, False


class Trainer:
    """AdamW on a task, scheduled by the share of the budget that is spent: of steps, or else of minutes.

    `seconds` is the time of training without judgements. `points` holds judgements: `seconds`, `tokens`, mean training loss
    `train` since the one before, and held-out `loss`. `curve` holds (seconds, tokens, loss) before each step, `norms` the norm
    of the gradients of each step, before they are clipped.
    """

    def __init__(self, task: Task, steps: int | None, minutes: float | None = None) -> None:
        self.task, self.steps, self.minutes, self.seconds, self.tokens = task, steps, minutes, 0.0, 0
        self.points: list[dict[str, Any]] = []
        self.curve: list[tuple[float, int, float]] = []
        self.norms: list[float] = []
        # Embeddings, biases and norms do not decay.
        decays = {name: p.dim() > 1 and not name.startswith("embedding") for name, p in task.model.named_parameters()}
        groups: list[dict[str, Any]] = [
            dict(params=[p for name, p in task.model.named_parameters() if decays[name] is on], weight_decay=WEIGHT_DECAY * on)
            for on in (True, False)
        ]
        self._optimizer = optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    @property
    def spent(self) -> float:
        """Share of the steps, or else of the minutes, that is spent, from 0 to 1."""
        return min(1.0, len(self.curve) / self.steps if self.steps else self.seconds / (60 * (self.minutes or 0.0)))

    def run(self, judgements: int, after_step: Callable[[], Any], after_judgement: Callable[[], Any]) -> None:
        """Judge, then train and judge in turns, `judgements` times, until the budget is spent."""
        for part in range(judgements + 1):
            first = len(self.curve)
            while self.spent < part / judgements:
                self.step()
                after_step()
            losses = [loss for *_, loss in self.curve[first:]]
            if losses or part == 0:
                train, loss = fmean(losses) if losses else None, self.task.judge()
                self.points.append(dict(seconds=self.seconds, tokens=self.tokens, train=train, loss=loss))
                after_judgement()

    def step(self) -> None:
        """Train on one batch. Raises KeyboardInterrupt where another rank was interrupted."""
        started, spent = time.perf_counter(), self.spent
        cosine = 0.5 * (1 + math.cos(math.pi * spent))
        for group in self._optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1.0, (spent + 1e-3) / WARM_UP) * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)
        self._optimizer.zero_grad()
        loss, tokens = self.task.backward(spent)
        self.norms.append(float(whole(nn.utils.clip_grad_norm_(self.task.model.parameters(), 1.0))))
        self._optimizer.step()
        self.curve.append((self.seconds, self.tokens, loss))
        self.tokens += tokens
        seconds, stop = self.task.clock(time.perf_counter() - started)
        self.seconds += seconds
        if stop:
            raise KeyboardInterrupt

    def rows(self, who: str, **values: Any) -> list[Row]:
        """Return the training so far, with further `values`, and its judgements; `finished` once the last model is judged."""
        finished = self.spent == 1.0 and bool(self.points) and self.points[-1]["tokens"] == self.tokens
        course = dict(steps=len(self.curve), tokens=self.tokens, seconds=self.seconds, finished=finished, curve=[*self.curve])
        judged = [Row(table="held out", case=dict(judgement=i), who=who, values=point) for i, point in enumerate(self.points)]
        return [Row(table="training", who=who, values=values | course), *judged]


def whole(tensor: Any) -> Tensor:
    """Return a tensor with all ranks' parts of it; all of them ask for it."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach()


class Demo(ABC):
    """One run of a demo. Making it does all that can fail for bad input, before any time is spent.

    `speaks`: True in the process that prints and writes. `stage`: present task, for the report of an interrupted run.
    `facts`: sizes of the model and its data; subclasses add theirs.
    """

    KIND: ClassVar[str]
    TITLE: ClassVar[str]

    def __init__(self, args: argparse.Namespace, model: nn.Module, layers: int, problem: Problem, speaks: bool = True) -> None:
        make_folder("--out", args.out)
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        self.args, self.speaks, self.stage = args, speaks, "starting"
        self.backends = [
            Row(table="backends", who=one.pop("name"), verdict=one.pop("verdict"), reasons=one.pop("reasons"), values=one)
            for one in explain(problem).to_dict()["backends"]
        ]
        self.facts: dict[str, Any] = dict(
            parameters=sum(p.numel() for p in model.parameters()),
            context=problem.seq,
            width=problem.heads * problem.head_dim,
            layers=layers,
            heads=problem.heads,
            head_dim=problem.head_dim,
            dtype=problem.dtype,
            pattern=str(problem.pattern),
            share_of_dense=problem.flops() / replace(problem, pattern=Pattern.dense()).flops(),
        )

    @abstractmethod
    def work(self) -> None:
        """Do everything, `stage` by `stage`."""

    @abstractmethod
    def rows(self) -> Iterable[Row]:
        """Return all rows that there are so far."""

    def result(self, interrupted: bool) -> RowsResult:
        """Return the result so far."""
        facts, rows = self.facts | dict(stage=self.stage), (*self.rows(), *self.backends)
        header: dict[str, Any] = dict(kind=self.KIND, suite=self.KIND, repeats=SAMPLES, interrupted=interrupted)
        return new_result(RowsResult, probe("cpu"), **header, facts=facts, rows=rows)

    def run(self) -> int:
        """Work and report; return the exit code."""
        interrupted = False
        try:
            self.work()
        except KeyboardInterrupt:
            interrupted = True
        if self.speaks:
            publish(self.result(interrupted), self.args.out, "report", self.TITLE, self.args.json)
        return INTERRUPTED if interrupted else 0

    def train(self, trainer: Trainer, judgements: int, name: str = "") -> None:
        """Train with a progress bar. Each judgement is printed, and the result so far written: launchers may end ranks."""
        with tqdm(total=1.0, leave=False, disable=None if self.speaks else True, bar_format=BAR) as bar:

            def advance() -> None:
                loss, speed = fmean(loss for *_, loss in trainer.curve[-20:]), trainer.tokens / trainer.seconds
                text = f"{name}{clock(trainer.seconds)}  loss {loss:.3f}  {speed:,.0f} tokens/s"
                bar.set_description_str(text, refresh=False)
                bar.update(trainer.spent - bar.n)

            def judged() -> None:
                if self.speaks:
                    point = trainer.points[-1]
                    line = f"{clock(point['seconds'])}  {point['tokens']:,} tokens: held-out loss {point['loss']:.3f}"
                    tqdm.write(f"{name}{line}", file=sys.stderr)
                    write_result(self.result(interrupted=True), self.args.out / "report.json")

            trainer.run(judgements, advance, judged)


def run_table(result: RowsResult, size: str, *, before: Iterable[document.Row], after: Iterable[document.Row]) -> document.Table:
    """Return the table of what was run: further rows around those of the model, then each backend, the one picked first."""
    facts = result.facts
    sizes = f"{counted(facts['layers'], 'layer')}, width {facts['width']}, {counted(facts['heads'], 'head')}, {size}"
    model = ("model", f"{facts['parameters'] / 1e6:.2f} M parameters: {sizes}")
    attention = ("attention", f"{facts['pattern']}: {facts['share_of_dense']:.1%} of the work of dense attention")
    backends, listed = rows_by_name(result, "backends"), list[document.Row]()
    for name, row in backends.items():
        reasons = "; ".join(filter(None, [row.values["detail"], *row.reasons]))
        verdict = f"{name:<{max(map(len, backends))}} {row.verdict}" + (f": {reasons}" if reasons else "")
        listed.append(("" if listed else "backend", verdict))
    return document.Table("The run", ("", "what"), (*before, model, attention, *after, *listed))


def rows_by_name(result: RowsResult, table: str) -> dict[str, Row]:
    """Return the rows of a table that has one case."""
    return {row.who: row for row in result.rows if row.table == table}


def judgements(result: RowsResult, who: str) -> list[dict[str, Any]]:
    """Return the judgements of a training, in their order."""
    return [row.values for row in result.rows if row.table == "held out" and row.who == who]


LOSS = fact("loss", template="{:.3f}")
"""Column of held-out losses."""
TEXT = "{text}: {train_bytes:,} bytes to learn from, {held_out_bytes:,} held out"
"""Template of the row of `run_table` on the text that was learnt from."""


def counted(number: int, noun: str) -> str:
    """Return a number of things in words.

    >>> counted(1, "step"), counted(2000, "step")
    ('1 step', '2,000 steps')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def clock(seconds: float) -> str:
    """Return minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
