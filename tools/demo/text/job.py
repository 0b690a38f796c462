"""The demo's job: train, then measure, then report, ended at any point by Ctrl-C. Over ranks all train, and rank 0 tells."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from typing import Any

import torch
from tqdm import tqdm

from dilkit import explain
from dilkit.comm import Comm
from dilkit.device import probe
from dilkit.tools.console import ranks as job
from dilkit.tools.console.interrupt import INTERRUPTED, stopping
from dilkit.tools.demo.text import report as demo_report
from dilkit.tools.demo.text import words as demo_words
from dilkit.tools.demo.text.corpus import Text, load_text
from dilkit.tools.demo.text.model import ModelConfig, save_model
from dilkit.tools.demo.text.ranks import Alone, Memory, Ranks, same_model
from dilkit.tools.demo.text.scaling import Scaling
from dilkit.tools.demo.text.train import SHORT_WINDOW, Budget, Trainer, held_out_windows
from dilkit.tools.results import untyped as results

_BAR = "{percentage:5.0f} % |{bar:30}| {desc}"


def train_and_measure(args: argparse.Namespace) -> int:
    """Run the job that `args` describes; 0, or 130 when interrupted: then the report holds what there was."""
    text = load_text(args.text, args.context)
    if args.comm is None:
        return Job(args, text, Alone()).run()
    memory = Memory()
    with stopping() as stop:
        return job.run(args, lambda comm: Job(args, text, comm, stop, memory).run())


class Job:
    """One run of the demo. Making it does all that can fail for bad input, before any time is spent."""

    def __init__(
        self, args: argparse.Namespace, text: Text, comm: Comm, stop: threading.Event | None = None, memory: Memory | None = None
    ) -> None:
        self.args, self.text, self.stage, self.interrupted = args, text, "starting", ""
        config = ModelConfig(context=args.context)
        self.ranks = Ranks(comm, config, stop, memory)
        self.ranks.rows(min(SHORT_WINDOW, args.context))  # raises if there are more ranks than bytes
        self.ranks.agree(text=text.digest(), context=args.context, steps=args.steps, minutes=args.minutes, seed=args.seed)
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        if comm.rank == 0:
            torch.manual_seed(args.seed)
        self.model = same_model(config, comm)
        self.trace = explain(config.problem())
        budget = Budget(steps=args.steps) if args.steps else Budget(seconds=60 * args.minutes)
        windows = held_out_windows(text.held_out, args.context)
        self.trainer = Trainer(self.model, text.train, windows, budget, args.seed, self.ranks)
        self.scaling = Scaling(config.problem(), [args.context * 2**i // 4 for i in range(5)])

    @property
    def tells(self) -> bool:
        """Whether this rank prints and writes."""
        return self.ranks.comm.rank == 0

    def run(self) -> int:
        """Train, measure, report; the exit code."""
        try:
            self.describe()
            self.train()
            if self.args.comm is None:
                self.measure()
        except KeyboardInterrupt:
            self.interrupted = self.stage
            self.say(f"\ninterrupted while {self.stage}")
        self.ranks.gather()
        if self.tells:
            self.report()
        return INTERRUPTED if self.interrupted else 0

    def say(self, line: str = "") -> None:
        """Print a line above the progress bar, if there is one; nothing with --json, nor on other ranks than 0."""
        if self.tells and not self.args.json:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def describe(self) -> None:
        """Print what will be done, and who computes it and why."""
        if not self.tells:
            return
        for line in demo_words.facts(self.results()):
            self.say(line)

    def train(self) -> None:
        """Train, with a progress bar and a line for every evaluation; the model is saved even if that is interrupted."""
        self.stage = "training"
        self.say(f"\n{demo_words.CURVE_HEADER}")
        hidden = None if self.tells and not self.args.json else True  # None: hidden where there is no terminal
        try:
            with tqdm(total=1.0, leave=False, disable=hidden, bar_format=_BAR) as bar:
                self.trainer.run(lambda: self._advance(bar), self._judged)
        finally:
            if self.tells and self.trainer.progress.steps:  # an untrained model is not worth an earlier one
                save_model(self.model, self.args.save)
            self.say(f"\n{demo_words.outcome(self.results())}")

    def _advance(self, bar: Any) -> None:
        progress = self.trainer.progress
        bar.set_description_str(
            demo_words.speed(progress.seconds, progress.recent_loss(), progress.tokens_per_second), refresh=False
        )
        bar.update(self.trainer.spent - bar.n)

    def _judged(self) -> None:
        self.say(demo_words.curve_line(self.trainer.points()[-1]))
        if self.args.comm is not None:
            self.keep()

    def keep(self) -> None:
        """Write what there is so far: launchers and batch systems may end ranks so soon that there is no time for it then."""
        self.ranks.gather()
        if self.tells:
            if self.trainer.progress.steps:
                save_model(self.model, self.args.save)
            demo_report.write(self.results() | dict(interrupted=self.stage), self.args.out, draw=False)

    def measure(self) -> None:
        """Measure dilated against dense attention, with a line a length."""
        self.stage = "measuring"
        for line in demo_words.scaling_header(self.scaling.to_dict()):
            self.say(line)
        self.scaling.run(lambda row: self.say(demo_words.scaling_line(row.to_dict())))

    def results(self) -> dict[str, Any]:
        """All there is so far, as plain data: what report.json holds."""
        return results.new(
            "demo",
            probe("cpu"),
            interrupted=self.interrupted or None,
            text=self.text.to_dict(),
            model=self.model.to_dict() | dict(file=str(self.args.save) if self.trainer.progress.steps else None),
            backend=self.trace.to_dict(),
            training=self.trainer.to_dict() | dict(seed=self.args.seed),
            scaling=self.scaling.to_dict(),
            ranks=self.ranks.to_dict(),
        )

    def report(self) -> None:
        """Write the report, and say where."""
        found = self.results()
        notes = demo_report.write(found, self.args.out)
        if self.args.json:
            print(json.dumps(found, allow_nan=False))
        for line in demo_words.closing(found, self.args.out, notes):
            self.say(line)
