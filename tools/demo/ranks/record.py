"""The result of `dilkit demo --ranks`: one training on ranks and in one process, and how far the two are apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dilkit.tools.demo.ranks.layout import Layout
from dilkit.tools.demo.text.record import ModelFacts, TextFacts, TrainedResult, Training
from dilkit.tools.results.record import Job


@dataclass(frozen=True, kw_only=True)
class RanksTraining(Training):
    """One of the two trainings. `norms`: of the gradients of each step, before they were clipped. `threads`: of each process."""

    norms: tuple[float, ...]
    threads: int


@dataclass(frozen=True, kw_only=True)
class LargestDifference:
    """The largest relative difference of a quantity between the trainings: where it was, and the bound of what is rounding."""

    quantity: str
    value: float
    where: str
    bound: float

    @property
    def is_rounding(self) -> bool:
        """Whether the bound holds. Of what is not a number it does not."""
        return self.value <= self.bound


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes that a rank sends in one step, in all layers, for a branch of the pattern, or for what stands beside them."""

    name: str
    route: str
    forward: int
    backward: int

    @property
    def total(self) -> int:
        """Both phases."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What attention sends in a step, by the exchange plan: of the rank that sends most, beside all keys and values.

    `planned`: the bytes of a step by rank of a sequence. `counted`: those of all steps by rank, as the transports counted them;
    empty before the training on ranks has ended.
    """

    rank: int
    branches: tuple[StepBytes, ...]
    full_ring: StepBytes
    planned: tuple[int, ...]
    counted: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RanksDemoResult(TrainedResult):
    """The two trainings as far as they came, and the differences once both have ended."""

    KIND: ClassVar[str] = "demo-ranks"

    text: TextFacts
    model: ModelFacts
    layout: Layout
    ranks: Job
    on_ranks: RanksTraining | None
    alone: RanksTraining | None
    differences: tuple[LargestDifference, ...]
    sent: Sent

    @property
    def agrees(self) -> bool:
        """Whether all differences are rounding; also where there are none yet."""
        return all(one.is_rounding for one in self.differences)
