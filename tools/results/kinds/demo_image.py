"""The result of `dilkit demo --image`: two models a seed, alike in all but the order of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from dilkit.tools.results.kinds.demo import Choice
from dilkit.tools.results.record import Result

CURVES = ("row-major", "hilbert")
"""The orders that are compared. An object by order has these names."""


@dataclass(frozen=True, kw_only=True)
class Photo:
    """The sizes of the photograph in pixels, and the strip that is held out: first row or column, and the first after it."""

    source: str
    rows: int
    columns: int
    crop: int
    held_out_columns: tuple[int, int]
    held_out_rows: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class ImageModel:
    """The sizes of the model and of its task: `grid` x `grid` patches of `patch` x `patch` pixels, a share of them hidden."""

    grid: int
    patch: int
    hidden: float
    width: int
    layers: int
    heads: int
    pattern: str
    parameters: int
    cells: int
    dtype: str
    share_of_dense: float


@dataclass(frozen=True)
class Judgement:
    """The held-out loss by order, after so many steps."""

    step: int
    held_out: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class PairTraining:
    """The two trainings of a seed: judgements, losses of all steps and seconds by order."""

    seed: int
    steps: int
    finished: bool
    points: tuple[Judgement, ...]
    train: dict[str, tuple[float, ...]]
    seconds: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class ImageTraining:
    """What was planned: seeds, steps of each model and crops a step; what is judged on; and what became of each seed."""

    seeds: int
    steps: int
    batch: int
    judged_crops: int
    masks: int
    twins: tuple[PairTraining, ...]


@dataclass(frozen=True)
class Guess:
    """What a guess without any training loses."""

    loss: float
    decibels: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The last judgements of all finished trainings.

    A difference is the loss under `CURVES[1]` less that under `CURVES[0]` of the same seed. It stands out if it has the same
    sign for all of at least two seeds, and its median exceeds the spread (largest less smallest) of either order over the seeds.
    """

    seeds: tuple[int, ...]
    losses: dict[str, tuple[float, ...]]
    medians: dict[str, float]
    decibels: dict[str, float]
    differences: tuple[float, ...]
    median_difference: float
    spread: float
    stands_out: bool

    @classmethod
    def of(cls, trainings: Sequence[PairTraining], decibels: Callable[[float], float]) -> Outcome | None:
        """None where no training is finished."""
        finished = [training for training in trainings if training.finished]
        if not finished:
            return None
        losses = {curve: tuple(training.points[-1].held_out[curve] for training in finished) for curve in CURVES}
        medians = {curve: median(found) for curve, found in losses.items()}
        differences = tuple(b - a for a, b in zip(*losses.values(), strict=True))
        spread = max(max(found) - min(found) for found in losses.values())
        alike = len({difference > 0 for difference in differences}) == 1 and len(differences) > 1
        return cls(
            seeds=tuple(training.seed for training in finished),
            losses=losses,
            medians=medians,
            decibels={curve: decibels(loss) for curve, loss in medians.items()},
            differences=differences,
            median_difference=median(differences),
            spread=spread,
            stands_out=alike and abs(median(differences)) > spread,
        )


@dataclass(frozen=True, kw_only=True)
class Sight:
    """Where the query patches lie, how many patches each sees in a head, and the share of its neighbours that a patch sees."""

    queries: dict[str, tuple[int, int]]
    keys_seen: dict[str, tuple[int, ...]]
    reaches: tuple[int, ...]
    neighbours_seen: dict[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        if any(len(shares) != len(self.reaches) for shares in self.neighbours_seen.values()):
            raise ValueError(f"neighbours_seen: not {len(self.reaches)} shares for each order, one a reach")


@dataclass(frozen=True, kw_only=True)
class ImageDemoResult(Result):
    """Hidden patches of a photograph, filled in by models with their tokens in row-major or Hilbert order."""

    KIND: ClassVar[str] = "demo-image"

    photo: Photo
    model: ImageModel
    backend: Choice
    training: ImageTraining
    baselines: dict[str, Guess]
    outcome: Outcome | None
    sight: Sight
    interrupted: str | None
