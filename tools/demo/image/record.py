"""The result of `dilkit demo --image`: two models a seed, alike in all but the order of their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dilkit.tools.demo.text.record import ModelFacts, TrainedResult, Training

ORDERS = ("row-major", "hilbert")
"""The orders that are compared."""


@dataclass(frozen=True, kw_only=True)
class ImageModel(ModelFacts):
    """The sizes of the model and of its task: `grid` x `grid` patches of `patch` x `patch` pixels, a share of them hidden."""

    grid: int
    patch: int
    hidden: float


@dataclass(frozen=True, kw_only=True)
class OrderTraining(Training):
    """The training of a model with its tokens in this order."""

    order: str


@dataclass(frozen=True, kw_only=True)
class ImageDemoResult(TrainedResult):
    """Hidden patches of a photograph, filled in by models with their tokens in row-major or Hilbert order.

    `judged` are the crops that losses are means over; `guess` is what a guess without any training loses on them.
    """

    KIND: ClassVar[str] = "demo-image"

    photo: str
    model: ImageModel
    trainings: tuple[OrderTraining, ...]
    judged: int
    guess: float

    def losses(self) -> dict[int, tuple[float, ...]]:
        """By seed, the last held-out losses in either order; of the seeds for which both trainings are finished."""
        last = {(one.seed, one.order): one.points[-1].held_out for one in self.trainings if one.finished}
        by_seed = {seed: tuple(last[seed, order] for order in ORDERS if (seed, order) in last) for seed, _ in last}
        return {seed: losses for seed, losses in by_seed.items() if len(losses) == len(ORDERS)}
