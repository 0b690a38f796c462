"""The image demo's job: for each seed train two models that differ in nothing but the order of their tokens, and compare them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial

from dilkit import explain
from dilkit.device import probe
from dilkit.tools.demo.image.model import ImageConfig
from dilkit.tools.demo.image.photo import load_photograph
from dilkit.tools.demo.image.pictures import draw_reconstruction, draw_sight
from dilkit.tools.demo.image.sight import PatternSight
from dilkit.tools.demo.image.task import BATCH, JUDGEMENTS, MASKS, RECIPE, Crops, ImageTask
from dilkit.tools.demo.job import Job, Picture, choice_of
from dilkit.tools.demo.trainer import Trainer
from dilkit.tools.report.document import plots
from dilkit.tools.report.kinds import demo_image
from dilkit.tools.report.picture import write_png
from dilkit.tools.results.file import new_result
from dilkit.tools.results.kinds.demo import Budget
from dilkit.tools.results.kinds.demo_image import CURVES, ImageDemoResult, ImageTraining, Judgement, Outcome, PairTraining

_TRIAL_STEPS = 4


def train_and_compare(args: argparse.Namespace) -> int:
    """Run the job that `args` describes; 0, or 130 when interrupted: then the report holds what there was."""
    return ImageJob(args, ImageConfig()).run()


class ImageJob(Job[ImageDemoResult]):
    """One run of the image demo."""

    TITLE, PICTURES = "dilkit demo --image", ("reconstruction.png", "loss.png", "sight.png")

    def __init__(self, args: argparse.Namespace, config: ImageConfig) -> None:
        super().__init__(args)
        self.config = config
        self.crops = Crops(load_photograph(None if args.image is True else args.image, config.crop), config)
        self.trace = explain(config.problem(BATCH))
        self.sight, self.guesses, self.model = PatternSight(config), self.crops.guesses(), config.facts(BATCH)
        self.steps = args.steps or 0
        self.pairs: dict[int, list[Trainer[ImageTask]]] = {}
        """By seed, the trainers of both models, in the order of `CURVES`."""

    def work(self) -> None:
        """Train seed after seed."""
        self.stage = "training"
        self.steps = self.steps or self._steps_in(60 * self.args.minutes)
        self.say_facts(demo_image.facts(self.result()))
        say_row = self.say_table(demo_image.TRAINING)
        for seed in range(self.args.seed, self.args.seed + self.args.seeds):
            self.pairs[seed] = pair = self._pair(seed, self.steps)
            self.train(
                pair, JUDGEMENTS, partial(_losses, seed, pair), lambda: say_row(demo_image.training_row(self.trainings()[-1]))
            )
        self.say(f"\n{demo_image.outcome(self.result().outcome)}")

    def _pair(self, seed: int, steps: int) -> list[Trainer[ImageTask]]:
        return [Trainer(ImageTask(self.crops, curve, seed), Budget(steps=steps), RECIPE) for curve in CURVES]

    def _steps_in(self, seconds: float) -> int:
        """How many steps all trainings together have time for, by a trial of a few."""
        pair = self._pair(self.args.seed, _TRIAL_STEPS)
        started = 0.0
        for step in range(_TRIAL_STEPS):
            if step == 1:
                started = time.perf_counter()
            for trainer in pair:
                trainer.step()
        a_step = (time.perf_counter() - started) / (_TRIAL_STEPS - 1)
        return max(JUDGEMENTS, int(seconds / self.args.seeds / a_step))

    def trainings(self) -> tuple[PairTraining, ...]:
        """The course of all trainings so far."""
        return tuple(_training(seed, pair, self.steps) for seed, pair in self.pairs.items())

    def result(self) -> ImageDemoResult:
        """All there is so far."""
        return new_result(
            ImageDemoResult,
            probe("cpu"),
            interrupted=self.interrupted,
            photo=self.crops.photo.facts(),
            model=self.model,
            backend=choice_of(self.trace),
            training=ImageTraining(
                seeds=self.args.seeds,
                steps=self.steps,
                batch=BATCH,
                judged_crops=len(self.crops.held_out),
                masks=MASKS,
                twins=self.trainings(),
            ),
            baselines=self.guesses,
            outcome=Outcome.of(self.trainings(), self.crops.decibels),
            sight=self.sight.facts(),
        )

    def pictures(self, result: ImageDemoResult) -> dict[str, Picture]:
        """The strip as the first finished pair fills it in, the losses, and what a patch sees."""
        judged = [pair for pair, one in zip(self.pairs.values(), self.trainings(), strict=True) if one.finished]
        judged += [pair for pair in self.pairs.values() if pair[-1].progress.held_out]
        found: dict[str, Picture] = {}
        if judged:
            tasks = {curve: trainer.task for curve, trainer in zip(CURVES, judged[0], strict=True)}
            found["reconstruction.png"] = partial(draw_reconstruction, self.crops, tasks)
        if shown := plots(demo_image.loss_plot(result)):
            found["loss.png"] = partial(write_png, shown)
        return {**found, "sight.png": partial(draw_sight, self.crops, self.sight)}


def _losses(seed: int, pair: Sequence[Trainer[ImageTask]]) -> str:
    """How training is going."""
    losses = (f"{demo_image.NAMES[curve]} {one.progress.recent_loss():.3f}" for curve, one in zip(CURVES, pair, strict=True))
    return f"seed {seed}  {'  '.join(losses)}"


def _training(seed: int, pair: Sequence[Trainer[ImageTask]], steps: int) -> PairTraining:
    """What became of a pair, as far as both have come."""
    judged = zip(*(trainer.progress.held_out for trainer in pair), strict=False)
    points = tuple(
        Judgement(both[0].steps, {curve: point.loss for curve, point in zip(CURVES, both, strict=True)}) for both in judged
    )
    courses = dict(zip(CURVES, (trainer.progress for trainer in pair), strict=True))
    return PairTraining(
        seed=seed,
        steps=min(progress.steps for progress in courses.values()),
        finished=bool(points) and points[-1].step == steps,
        points=points,
        train={curve: tuple(point.loss for point in progress.train) for curve, progress in courses.items()},
        seconds={curve: progress.seconds for curve, progress in courses.items()},
    )
