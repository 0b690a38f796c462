"""The image demo's job: for each seed train two models that differ in nothing but the order of their tokens, and compare them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
from torch import Tensor

from dilkit.device import probe
from dilkit.tools.demo.block import model_facts
from dilkit.tools.demo.image.model import ImageConfig, PatchTransformer
from dilkit.tools.demo.image.photo import BATCH, SAMPLE, SIDE, Crops, load_photograph
from dilkit.tools.demo.image.record import ORDERS, ImageDemoResult, ImageModel, OrderTraining
from dilkit.tools.demo.image.task import FillIn
from dilkit.tools.demo.job import Job, backend_choice
from dilkit.tools.demo.text.record import Budget
from dilkit.tools.demo.trainer import Trainer
from dilkit.tools.report.picture import INK, new_figure, save
from dilkit.tools.results.file import new_result

JUDGEMENTS = 4
"""How often a training is judged in its course, besides before it."""


class ImageJob(Job):
    """One run of the image demo."""

    TITLE = "dilkit demo --image"

    def __init__(self, args: argparse.Namespace, config: ImageConfig) -> None:
        super().__init__(args)
        self.photo = SAMPLE if args.image is True else args.image
        self.crops = Crops(load_photograph(None if args.image is True else args.image, SIDE * config.crop), config)
        self.guess = self.crops.guess()
        sizes = dict(grid=config.grid, patch=config.patch, hidden=config.hidden)
        model, self.problem = PatchTransformer(config, ORDERS[0]), config.problem(BATCH)
        self.model = model_facts(ImageModel, model, config.layers, self.problem, **sizes)
        if args.minutes:
            self.budget = Budget(seconds=60 * args.minutes / (args.seeds * len(ORDERS)))
        else:
            self.budget = Budget(steps=args.steps)
        self.trainers: dict[tuple[int, str], Trainer] = {}

    def work(self) -> None:
        """Train seed after seed, in either order."""
        self.stage = "training"
        for seed in range(self.args.seed, self.args.seed + self.args.seeds):
            tasks = {order: FillIn(self.crops, order, seed) for order in ORDERS}
            for order, task in tasks.items():
                self.trainers[seed, order] = Trainer(task, self.budget)
                self.train(self.trainers[seed, order], JUDGEMENTS, f"seed {seed}, {order}: ")
            if seed == self.args.seed:
                self._draw({order: task.filled_in() for order, task in tasks.items()})

    def result(self, interrupted: str | None) -> ImageDemoResult:
        """All there is so far."""
        trainers = self.trainers.items()
        return new_result(
            ImageDemoResult,
            probe("cpu"),
            interrupted=interrupted,
            photo=self.photo,
            model=self.model,
            backend=backend_choice(self.problem),
            trainings=tuple(trainer.record(OrderTraining, seed=seed, order=order) for (seed, order), trainer in trainers),
            judged=len(self.crops.held_out),
            guess=self.guess,
        )

    def _draw(self, filled: Mapping[str, Tensor]) -> None:
        """The strip with its hidden patches, as it is filled in under each order, and as it is."""
        patches, hidden = self.crops.held_out[:SIDE], self.crops.hidden[:SIDE, :, None]
        strips = {"what the models see": patches.masked_fill(hidden, 0.0)}
        strips |= {order: torch.where(hidden, found[:SIDE], patches) for order, found in filled.items()}
        strips["as it is"] = patches
        with new_figure(8, 8) as figure:
            for axis, (title, strip) in zip(figure.subplots(1, len(strips)), strips.items(), strict=True):
                axis.imshow(self.crops.picture(strip).numpy())
                axis.set_title(title, color=INK)
                axis.set_axis_off()
            save(figure, self.args.out / "reconstruction.png", dpi=150)
