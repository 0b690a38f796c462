"""The image demo's job: for each seed train two models that differ in nothing but the order of their tokens, and compare them."""

from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import fmean

from dilkit import explain
from dilkit.device import probe
from dilkit.tools.demo.image.model import ImageConfig
from dilkit.tools.demo.image.photo import load_photograph
from dilkit.tools.demo.image.pictures import draw_reconstruction, draw_sight
from dilkit.tools.demo.image.sight import PatternSight
from dilkit.tools.demo.image.task import BATCH, JUDGEMENTS, MASKS, RECIPE, Crops, PairTask
from dilkit.tools.demo.job import Job, Picture, choice_of
from dilkit.tools.demo.trainer import Trainer
from dilkit.tools.report.document import plots
from dilkit.tools.report.kinds import demo_image
from dilkit.tools.report.picture import write_png
from dilkit.tools.results.file import new_result
from dilkit.tools.results.kinds.demo import Budget
from dilkit.tools.results.kinds.demo_image import CURVES, ImageDemoResult, ImageTraining, Judgement, Outcome, PairTraining

_TRIAL_STEPS = 4


class ImageJob(Job[ImageDemoResult]):
    """One run of the image demo."""

    TITLE, PICTURES = "dilkit demo --image", ("reconstruction.png", "loss.png", "sight.png")

    def __init__(self, args: argparse.Namespace, config: ImageConfig) -> None:
        super().__init__(args)
        self.crops = Crops(load_photograph(None if args.image is True else args.image, config.crop), config)
        self.trace = explain(config.problem(BATCH))
        self.sight, self.guesses, self.model = PatternSight(config), self.crops.guesses(), config.facts(BATCH)
        self.steps = args.steps or 0
        self.pairs: dict[int, tuple[PairTask, Trainer[dict[str, float]]]] = {}
        """By seed."""

    def work(self) -> None:
        """Train seed after seed."""
        self.stage = "training"
        self.steps = self.steps or self._steps_in(60 * self.args.minutes)
        self.say_facts(demo_image.facts(self.result()))
        say_row = self.say_table(demo_image.TRAINING)
        for seed in range(self.args.seed, self.args.seed + self.args.seeds):
            self.pairs[seed] = pair = self._pair(seed, self.steps)
            label = partial(_losses, seed, pair[1])
            self.train(pair[1], JUDGEMENTS, label, lambda: say_row(demo_image.training_row(self.trainings()[-1])))
        self.say(f"\n{demo_image.outcome(self.result().outcome)}")

    def _pair(self, seed: int, steps: int) -> tuple[PairTask, Trainer[dict[str, float]]]:
        task = PairTask(self.crops, seed)
        return task, Trainer(task, Budget(steps=steps), RECIPE)

    def _steps_in(self, seconds: float) -> int:
        """How many steps all trainings together have time for, by a trial of a few."""
        _, trainer = self._pair(self.args.seed, _TRIAL_STEPS)
        trainer.step()
        started = time.perf_counter()
        for _ in range(1, _TRIAL_STEPS):
            trainer.step()
        a_step = (time.perf_counter() - started) / (_TRIAL_STEPS - 1)
        return max(JUDGEMENTS, int(seconds / self.args.seeds / a_step))

    def trainings(self) -> tuple[PairTraining, ...]:
        """The course of all trainings so far."""
        return tuple(
            PairTraining(
                seed=seed,
                steps=trainer.steps,
                finished=bool(trainer.held_out) and trainer.held_out[-1].steps == self.steps,
                points=tuple(Judgement(point.steps, point.loss) for point in trainer.held_out),
                train={curve: tuple(point.loss[curve] for point in trainer.train) for curve in CURVES},
                seconds=dict(task.seconds),
            )
            for seed, (task, trainer) in self.pairs.items()
        )

    def result(self) -> ImageDemoResult:
        """All there is so far."""
        trainings = self.trainings()
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
                twins=trainings,
            ),
            baselines=self.guesses,
            outcome=Outcome.of(trainings, self.crops.decibels),
            sight=self.sight.facts(),
        )

    def pictures(self, result: ImageDemoResult) -> dict[str, Picture]:
        """The strip as the first finished pair fills it in, or else the first; the losses; and what a patch sees."""
        judged = sorted((one for one in result.training.twins if one.points), key=lambda one: not one.finished)
        found: dict[str, Picture] = {}
        if judged:
            found["reconstruction.png"] = partial(draw_reconstruction, self.pairs[judged[0].seed][0])
            found["loss.png"] = partial(write_png, plots(demo_image.loss_plot(result)))
        return {**found, "sight.png": partial(draw_sight, self.crops.photo, self.sight)}


def _losses(seed: int, trainer: Trainer[dict[str, float]]) -> str:
    """How training is going."""
    recent = [point.loss for point in trainer.train[-20:]]
    return "  ".join(
        [f"seed {seed}", *(f"{demo_image.NAMES[curve]} {fmean(loss[curve] for loss in recent):.3f}" for curve in CURVES)]
    )
