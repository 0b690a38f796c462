"""The image demo's job: train two models a seed, compare, report, ended at any point by Ctrl-C."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

import torch
from tqdm import tqdm

from dilkit import Pattern, explain
from dilkit.device import probe
from dilkit.tools.console.interrupt import INTERRUPTED
from dilkit.tools.demo.image import report as demo_image_report
from dilkit.tools.demo.image import words as demo_image_words
from dilkit.tools.demo.image.model import CURVES, ImageConfig, PatchTransformer
from dilkit.tools.demo.image.outcome import compare
from dilkit.tools.demo.image.photo import load_photograph
from dilkit.tools.demo.image.sight import Sight
from dilkit.tools.demo.image.train import BATCH, CURVE_POINTS, MASKS, Task, Twins
from dilkit.tools.results import untyped as results

_TRIAL_STEPS = 4
_BAR = "{percentage:5.0f} % |{bar:30}| {desc}"


def train_and_compare(args: argparse.Namespace) -> int:
    """Run the job that `args` describes; 0, or 130 when interrupted: then the report holds what there was."""
    return Job(args, ImageConfig()).run()


class Job:
    """One run of the image demo. Making it does all that can fail for bad input, before any time is spent."""

    def __init__(self, args: argparse.Namespace, config: ImageConfig) -> None:
        self.args, self.config, self.interrupted = args, config, ""
        self.task = Task(load_photograph(None if args.image is True else args.image, config.crop), config)
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        self.trace = explain(config.problem(BATCH))
        self.sight, self.baselines = Sight(config), self.task.baselines()
        self.parameters = sum(p.numel() for p in PatchTransformer(config, config.order(CURVES[0])).parameters())
        self.steps, self.twins = args.steps or 0, list[Twins]()

    def run(self) -> int:
        """Train, compare, report; the exit code."""
        try:
            self.steps = self.steps or self._steps_in(60 * self.args.minutes)
            self.describe()
            self.train()
        except KeyboardInterrupt:
            self.interrupted = "training"
            self.say("\ninterrupted while training")
        self.report()
        return INTERRUPTED if self.interrupted else 0

    def _steps_in(self, seconds: float) -> int:
        """How many steps all trainings together have time for, by a trial of a few."""
        trial = Twins(self.task, _TRIAL_STEPS, self.args.seed)
        trial.step()
        started = time.perf_counter()
        for _ in range(1, _TRIAL_STEPS):
            trial.step()
        a_step = (time.perf_counter() - started) / (_TRIAL_STEPS - 1)
        return max(CURVE_POINTS, int(seconds / self.args.seeds / a_step))

    def say(self, line: str = "") -> None:
        """Print a line above the progress bar, if there is one; nothing with --json."""
        if not self.args.json:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def describe(self) -> None:
        """Print what will be done, and who computes it and why."""
        for line in [*demo_image_words.facts(self.results()), "", demo_image_words.CURVE_HEADER]:
            self.say(line)

    def train(self) -> None:
        """Train seed after seed, with a progress bar and a line for every judgement."""
        hidden = True if self.args.json else None  # None: hidden where there is no terminal
        with tqdm(total=self.steps * self.args.seeds, leave=False, disable=hidden, bar_format=_BAR) as bar:
            for seed in range(self.args.seed, self.args.seed + self.args.seeds):
                twins = Twins(self.task, self.steps, seed)
                self.twins.append(twins)
                twins.run(lambda: self._advance(bar), lambda: self.say(demo_image_words.curve_line(self.twins[-1].to_dict())))

    def _advance(self, bar: Any) -> None:
        twins = self.twins[-1]
        recent = {curve: twins.recent_loss(curve) for curve in CURVES}
        bar.set_description_str(demo_image_words.progress(twins.seed, recent), refresh=False)
        bar.update()

    def results(self) -> dict[str, Any]:
        """All there is so far, as plain data: what report.json holds."""
        trainings = [twins.to_dict() for twins in self.twins]
        guesses = {name: dict(loss=loss, decibels=self.task.decibels(loss)) for name, loss in self.baselines.items()}
        return results.new(
            "demo-image",
            probe("cpu"),
            interrupted=self.interrupted or None,
            photo=self.task.photo.to_dict(),
            model=self._model(),
            backend=self.trace.to_dict(),
            training=self._planned() | dict(twins=trainings),
            baselines=guesses,
            outcome=compare(trainings, self.task.decibels),
            sight=self.sight.to_dict(),
        )

    def _planned(self) -> dict[str, Any]:
        judged = dict(judged_crops=len(self.task.held_out), masks=MASKS)
        return dict(seeds=self.args.seeds, steps=self.steps, batch=BATCH, **judged)

    def _model(self) -> dict[str, Any]:
        dense = dataclasses.replace(self.config, pattern=Pattern.dense()).problem(BATCH)
        ours = self.config.problem(BATCH)
        sizes = dict(parameters=self.parameters, cells=self.config.cells, dtype=ours.dtype)
        return self.config.to_dict() | sizes | dict(share_of_dense=ours.flops() / dense.flops())

    def report(self) -> None:
        """Write the report, and say what came of it and where it is."""
        found = self.results()
        notes = demo_image_report.write(found, self.args.out, self.task, self.sight, self.twins)
        if self.args.json:
            print(json.dumps(found, allow_nan=False))
        for line in ["", demo_image_words.outcome(found), *demo_image_words.closing(self.args.out, notes)]:
            self.say(line)
