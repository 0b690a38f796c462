"""Code that all demos share: a training with a schedule, and a report, which Ctrl-C brings at any point."""

import argparse
import math
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn, optim

from dilkit import Pattern, Problem, explain
from dilkit.comm import Comm
from dilkit.comm.collectives import gather_values
from dilkit.device import probe
from dilkit.tools.console.arguments import make_folder
from dilkit.tools.console.interrupt import INTERRUPTED
from dilkit.tools.report import document
from dilkit.tools.report.files import publish
from dilkit.tools.report.views import fact
from dilkit.tools.results.file import new_result, write_result
from dilkit.tools.results.rows import ResultRow, RowsResult

PEAK_RATE, FINAL_SHARE, WARM_UP, WEIGHT_DECAY, SAMPLES = 3e-3, 0.05, 0.03, 0.1, 5
"""The learning rate grows over a share `WARM_UP` of the budget, then falls along a cosine to `FINAL_SHARE` of its peak."""


class Task(ABC):
    """A model and its training data: `batch` returns the next loss and its tokens, `judge` the loss on held-out data."""

    model: nn.Module

    @abstractmethod
    def batch(self, spent: float) -> tuple[Tensor, int]: ...

    @abstractmethod
    def judge(self) -> float: ...

    def backward(self, loss: Tensor) -> float:
        """Set the gradients of a loss; return it as a number."""
        torch.autograd.backward(loss)
        return loss.item()


class Trainer:
    """AdamW on a task, scheduled by the share of the budget that is spent: of steps, or else of minutes.

    `curve` holds (seconds, tokens, loss) before each step; `clock` makes the time of a step the same on all ranks.
    """

    def __init__(
        self, task: Task, steps: int | None, minutes: float | None = None, clock: Callable[[float], float] = float
    ) -> None:
        self.task, self.steps, self.minutes, self.clock = task, steps, minutes, clock
        self.seconds, self.tokens, self.threads = 0.0, 0, torch.get_num_threads()
        self.points: list[dict[str, Any]] = []
        self.curve: list[tuple[float, int, float]] = []
        self.norms: list[float] = []
        weights: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in task.model.named_parameters():  # embeddings, biases and norms do not decay
            weights[parameter.dim() > 1 and not name.startswith("embedding")].append(parameter)
        groups: list[dict[str, Any]] = [dict(params=weights[on], weight_decay=WEIGHT_DECAY * on) for on in (True, False)]
        self._optimizer = optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    @property
    def spent(self) -> float:
        """Share of the steps, or else of the minutes, that is spent, from 0 to 1."""
        return min(1.0, len(self.curve) / self.steps if self.steps else self.seconds / (60 * (self.minutes or 0.0)))

    def run(self, judgements: int) -> Iterator[dict[str, Any]]:
        """Judge, then train and judge in turns, `judgements` times; yield each judgement."""
        for part in range(judgements + 1):
            losses = []
            while self.spent < part / judgements:
                losses.append(self.step())
            if losses or part == 0:
                train, loss = fmean(losses) if losses else None, self.task.judge()
                self.points.append(dict(seconds=self.seconds, tokens=self.tokens, train=train, loss=loss))
                yield self.points[-1]

    def step(self) -> float:
        started, spent = time.perf_counter(), self.spent
        cosine = 0.5 * (1 + math.cos(math.pi * spent))
        for group in self._optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1.0, (spent + 1e-3) / WARM_UP) * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)
        self._optimizer.zero_grad()
        batch_loss, tokens = self.task.batch(spent)
        loss = self.task.backward(batch_loss)
        self.norms.append(float(whole(nn.utils.clip_grad_norm_(self.task.model.parameters(), 1.0))))
        self._optimizer.step()
        self.curve.append((self.seconds, self.tokens, loss))
        self.tokens += tokens
        self.seconds += self.clock(time.perf_counter() - started)
        return loss


def whole(tensor: Any) -> Tensor:
    """Return a tensor with all ranks' parts of it; all of them ask for it."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach()


def shared_clock(comm: Comm, stop: threading.Event, seconds: float) -> float:
    """Return rank 0's seconds of a step. Raises KeyboardInterrupt on all ranks after the same step if `stop` is set on one."""
    steps = gather_values(comm, (seconds, stop.is_set()))
    if any(stopped for _, stopped in steps):
        raise KeyboardInterrupt
    return steps[0][0]


class Run(AbstractContextManager["Run"]):
    """A block that ends with the report of its rows and facts, by the process that `speaks`, also where Ctrl-C ends it."""

    def __init__(
        self, title: str, args: argparse.Namespace, model: nn.Module, problem: Problem, facts: dict[str, Any], speaks: bool = True
    ) -> None:
        make_folder("--out", args.out)
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        self.title, self.args, self.speaks, self.code = title, args, speaks, 0
        self.trainers: dict[str, Trainer] = {}
        self.rows = [
            ResultRow(table="backends", who=one.name, verdict=one.verdict, reasons=one.reasons, values=dict(detail=one.detail))
            for one in explain(problem).decisions
        ]
        share_of_dense = problem.flops() / replace(problem, pattern=Pattern.dense()).flops()
        self.facts = facts | dict(context=problem.seq, width=problem.heads * problem.head_dim, heads=problem.heads)
        self.facts |= dict(head_dim=problem.head_dim, dtype=problem.dtype, pattern=str(problem.pattern))
        self.facts |= dict(share_of_dense=share_of_dense, parameters=sum(p.numel() for p in model.parameters()))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        interrupted = isinstance(error, KeyboardInterrupt)
        self.code = INTERRUPTED * interrupted
        if self.speaks and (interrupted or error is None):
            publish(self.result(interrupted), self.args.out, "report", self.title, self.args.json)
        return interrupted

    def result(self, interrupted: bool) -> RowsResult:
        rows = list[ResultRow]()
        for name, trainer in self.trainers.items():
            values = {fact: getattr(trainer, fact) for fact in ("tokens", "seconds", "threads", "curve")}
            rows.append(ResultRow(table="training", who=name, values=dict(steps=len(trainer.curve)) | values))
            rows += (
                ResultRow(table="held out", case=dict(judgement=i), who=name, values=x) for i, x in enumerate(trainer.points)
            )
        kind = self.title.removeprefix("dilkit ").replace(" --", "-")
        header: dict[str, Any] = dict(kind=kind, suite=kind, repeats=SAMPLES, interrupted=interrupted)
        return new_result(RowsResult, probe("cpu"), **header, facts=self.facts, rows=(*rows, *self.rows))

    def train(self, name: str, trainer: Trainer, judgements: int) -> None:
        """Train. Each judgement is printed, and the result so far written: launchers may end ranks."""
        self.trainers[name], self.facts["stage"] = trainer, "training"
        for point in trainer.run(judgements):
            if self.speaks:
                line = f"{name}: {clock(point['seconds'])}  {point['tokens']:,} tokens: held-out loss {point['loss']:.3f}"
                print(line, file=sys.stderr)
                write_result(self.result(interrupted=True), self.args.out / "report.json")


def run_table(result: RowsResult, after: Iterable[document.Row], about: document.Row | None = None) -> document.Table:
    """Return the table of what was run: the text, or else what it was `about`; the model; further rows; each backend."""
    facts, backends, listed = result.facts, rows_by_name(result, "backends"), list[document.Row]()
    if about is None:
        learnt = f"{facts['train_bytes']:,} bytes ({facts['train_files']:,} files) to learn from"
        about = "text", f"{facts['text']}: {learnt}, {facts['held_out_bytes']:,} ({len(facts['held_out_files'])}) held out"
    sizes = "{layers} layers, width {width}, {heads} heads, {context:,} tokens of context".format(**facts)
    attention = "{pattern}: {share_of_dense:.1%} of the work of dense attention".format(**facts)
    for name, row in backends.items():
        reasons = "; ".join(filter(None, [row.values["detail"], *row.reasons]))
        verdict = f"{name:<{max(map(len, backends))}} {row.verdict}" + (f": {reasons}" if reasons else "")
        listed.append(("" if listed else "backend", verdict))
    model = "model", f"{facts['parameters'] / 1e6:.2f} M parameters: {sizes}"
    return document.Table("The run", ("", "what"), (about, model, ("attention", attention), *after, *listed))


def rows_by_name(result: RowsResult, table: str) -> dict[str, ResultRow]:
    return {row.who: row for row in result.rows if row.table == table}


def judgements(result: RowsResult, who: str) -> list[dict[str, Any]]:
    return [row.values for row in result.rows if row.table == "held out" and row.who == who]


LOSS = fact("loss", template="{:.3f}")


def clock(seconds: float) -> str:
    return "{}:{:02}".format(*divmod(round(seconds), 60))
