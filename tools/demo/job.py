"""What a run of either demo has in common: a progress bar, and a report at the end, which Ctrl-C brings at any point."""

from __future__ import annotations

import argparse
import sys
from abc import ABC, abstractmethod
from statistics import fmean
from typing import Any, ClassVar

import torch
from tqdm import tqdm

from dilkit import Problem, explain
from dilkit.tools.console.interrupt import INTERRUPTED
from dilkit.tools.demo.text.document import clock
from dilkit.tools.demo.text.record import Choice, TrainedResult, Training
from dilkit.tools.demo.trainer import Trainer
from dilkit.tools.report.files import publish
from dilkit.tools.results.decode import decode
from dilkit.tools.results.file import write_result

REPORT = "report"
_BAR = "{percentage:5.0f} % |{bar:30}| {desc}"


class Job(ABC):
    """One run of a demo. Making it does all that can fail for bad input, before any time is spent.

    `speaks`: whether this process prints and writes. `stage`: what it is doing.
    """

    TITLE: ClassVar[str]

    def __init__(self, args: argparse.Namespace, speaks: bool = True) -> None:
        self.args, self.speaks, self.stage = args, speaks, "starting"
        if args.threads is not None:
            torch.set_num_threads(args.threads)

    @abstractmethod
    def work(self) -> None:
        """Do it all, `stage` by stage."""

    @abstractmethod
    def result(self, interrupted: str | None) -> TrainedResult:
        """All there is so far; `interrupted` is the stage at which it ended."""

    def run(self) -> int:
        """Work and report; the exit code."""
        interrupted = None
        try:
            self.work()
        except KeyboardInterrupt:
            interrupted = self.stage
        if self.speaks:
            publish(self.result(interrupted), self.args.out, REPORT, self.TITLE, self.args.json)
        return INTERRUPTED if interrupted else 0

    def train(self, trainer: Trainer, judgements: int, name: str = "") -> None:
        """Train with a progress bar. Each judgement is printed, and the result so far written: launchers may end ranks."""
        with self.bar() as bar:

            def advance() -> None:
                show_progress(bar, name, trainer.record(Training))

            def judged() -> None:
                if self.speaks:
                    point = trainer.points[-1]
                    line = f"{name}{clock(point.seconds)}  {point.tokens:,} tokens: held-out loss {point.held_out:.3f}"
                    tqdm.write(line, file=sys.stderr)
                    write_result(self.result(self.stage), self.args.out / f"{REPORT}.json")

            trainer.run(judgements, advance, judged)

    def bar(self) -> Any:
        """A progress bar from 0 to 1, which only shows where this process speaks to a terminal."""
        return tqdm(total=1.0, leave=False, disable=None if self.speaks else True, bar_format=_BAR)


def show_progress(bar: Any, name: str, training: Training) -> None:
    """Set a bar to the course of a training so far, which has made a step at least."""
    loss, speed = fmean(loss for *_, loss in training.train_curve[-20:]), training.tokens / training.seconds
    text = f"{name}{clock(training.seconds)}  loss {loss:.3f}  {speed:,.0f} tokens/s"
    bar.set_description_str(text, refresh=False)
    bar.update(training.spent - bar.n)


def backend_choice(problem: Problem) -> Choice:
    """What the selector says of a problem, as a record."""
    return decode(Choice, explain(problem).to_dict())
