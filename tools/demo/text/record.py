"""The result of `dilkit demo`, and what it has in common with that of `dilkit demo --image`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dilkit.tools.results.record import Job, Measurement, Result


@dataclass(frozen=True)
class Candidate:
    """A backend, the selector's verdict on it, and why."""

    name: str
    verdict: str
    reasons: tuple[str, ...]
    detail: str | None


@dataclass(frozen=True)
class Choice:
    """The backend that the selector picked for the model's attention, and all that it chose from."""

    picked: str | None
    backends: tuple[Candidate, ...]


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The sizes of a model. `share_of_dense`: FLOPs of its attention over those of dense attention."""

    parameters: int
    context: int
    width: int
    layers: int
    heads: int
    dtype: str
    pattern: str
    share_of_dense: float

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.width // self.heads


@dataclass(frozen=True)
class Evaluation:
    """The held-out loss in the course of training; `train` is the mean training loss since the evaluation before."""

    seconds: float
    tokens: int
    train: float | None
    held_out: float


@dataclass(frozen=True)
class Budget:
    """When training ends: after `steps` steps, or else after `seconds` seconds of it."""

    seconds: float = 0.0
    steps: int | None = None

    def spent(self, seconds: float, steps: int) -> float:
        """The share that is spent, from 0 to 1."""
        return min(1.0, steps / self.steps if self.steps else seconds / self.seconds)


@dataclass(frozen=True, kw_only=True)
class Training:
    """The course of a training. `train_curve`: (seconds, tokens trained on, loss) before each step."""

    budget: Budget
    seed: int = 0
    steps: int
    tokens: int
    seconds: float
    points: tuple[Evaluation, ...]
    train_curve: tuple[tuple[float, int, float], ...]

    @property
    def spent(self) -> float:
        """The share of the budget that is spent, from 0 to 1."""
        return self.budget.spent(self.seconds, self.steps)

    @property
    def finished(self) -> bool:
        """Whether the budget is spent, and what was learnt is judged."""
        return self.spent == 1.0 and self.points[-1].tokens == self.tokens


@dataclass(frozen=True, kw_only=True)
class TrainedResult(Result):
    """Models trained with dilated attention. `interrupted`: while doing what."""

    backend: Choice
    interrupted: str | None


@dataclass(frozen=True, kw_only=True)
class TextFacts:
    """The sizes of the text that was trained on, and of the files that were held out."""

    source: str
    train_bytes: int
    held_out_bytes: int
    train_files: int
    held_out_files: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TextTraining(Training):
    """The training of a language model, at first on short windows: for a share of the budget."""

    held_out_windows: int
    short_window_bytes: int
    short_window_share: float


@dataclass(frozen=True)
class Measured:
    """One forward and backward pass: the median of its samples in seconds, and its peak memory in bytes."""

    seconds: float
    samples: tuple[float, ...]
    peak_bytes: int | None

    def __post_init__(self) -> None:
        if not self.samples or min(self.samples) <= 0:
            raise ValueError(f"samples: {len(self.samples)} samples; one at least is needed, and all must be positive")


@dataclass(frozen=True)
class Length:
    """One length of the comparison."""

    tokens: int
    dilated: Measured
    dense: Measured


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The attention of one layer beside dense attention, as the sequence grows; `backends` computed the two, by their names."""

    backends: dict[str, str | None]
    memory_note: str
    rows: tuple[Length, ...]


@dataclass(frozen=True)
class NextByte:
    """One byte more after about `tokens` of them, in seconds: with caches, and by computing every row again."""

    tokens: int
    cached: tuple[float, ...]
    recomputed: tuple[float, ...]

    def __post_init__(self) -> None:
        for name, samples in (("cached", self.cached), ("recomputed", self.recomputed)):
            if not samples or min(samples) <= 0:
                raise ValueError(f"{name}: {len(samples)} samples; one at least is needed, and all must be positive")


@dataclass(frozen=True, kw_only=True)
class DemoResult(TrainedResult):
    """A byte-level language model, trained on text, and its attention beside dense attention. `ranks`: those that trained it."""

    KIND: ClassVar[str] = "demo"

    text: TextFacts
    model: ModelFacts
    training: TextTraining
    scaling: Scaling
    generation: tuple[NextByte, ...] = ()
    ranks: Job | None = None

    def measurements(self) -> Iterator[Measurement]:
        for row in self.scaling.rows:
            for name, measured in (("dilated", row.dilated), ("dense", row.dense)):
                yield Measurement(f"{row.tokens:,} tokens: {name}", measured.samples)
        for step in self.generation:
            for name, samples in (("cached", step.cached), ("recomputed", step.recomputed)):
                yield Measurement(f"next byte after {step.tokens:,}: {name}", samples)

    def problem_facts(self) -> dict[str, str]:
        return dict(pattern=self.model.pattern, heads=str(self.model.heads), head_dim=str(self.model.head_dim))
