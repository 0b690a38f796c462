"""The result of `dilkit demo`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dilkit.tools.results.record import Measurement, Result


@dataclass(frozen=True)
class Candidate:
    """A backend, the selector's verdict on it, and why."""

    name: str
    verdict: str
    reasons: tuple[str, ...]
    detail: str | None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which backend the selector picked for the model's attention: a trace as plain data."""

    picked: str | None
    why: str = ""
    requested: tuple[str, ...] = ()
    device: str = ""
    problem: str = ""
    backends: tuple[Candidate, ...]


@dataclass(frozen=True, kw_only=True)
class TextFacts:
    """The sizes of the text that was trained on, and of the files that were held out."""

    source: str
    train_bytes: int
    held_out_bytes: int
    train_files: int
    held_out_files: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The sizes of the model. `share_of_dense`: FLOPs of its attention over those of dense attention."""

    parameters: int
    context: int
    width: int
    layers: int
    heads: int
    dtype: str
    pattern: str
    share_of_dense: float
    file: str | None


@dataclass(frozen=True)
class Evaluation:
    """Held-out bits per byte in the course of training; `train` is the mean training loss since the evaluation before."""

    seconds: float
    tokens: int
    train: float | None
    held_out: float


@dataclass(frozen=True)
class Budget:
    """When training ends: after `steps` steps, or else after `seconds` seconds of it."""

    seconds: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if not self.steps and not self.seconds:
            raise ValueError("budget: neither seconds nor steps")

    def spent(self, seconds: float, steps: int) -> float:
        """The share that is spent, from 0 to 1."""
        share = steps / self.steps if self.steps else seconds / (self.seconds or 1.0)
        return min(share, 1.0)


@dataclass(frozen=True, kw_only=True)
class Training:
    """The course of the training. `train_curve`: (seconds, bytes trained on, bits per byte) before each step."""

    before: float | None
    after: float | None
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    held_out_windows: int
    window_bytes: int
    short_window_bytes: int
    short_window_share: float
    budget: Budget
    points: tuple[Evaluation, ...]
    train_curve: tuple[tuple[float, int, float], ...]
    seed: int = 0


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
    """One length of the comparison; what was left out is None, and `note` says why. `speedup`: dense over dilated time."""

    tokens: int
    dilated: Measured | None
    dense: Measured | None
    note: str
    speedup: float | None


@dataclass(frozen=True)
class Computed:
    """The backends that computed the two kinds of attention."""

    dilated: str | None
    dense: str | None


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Dilated beside dense attention, as the sequence grows."""

    batch: int
    heads: int
    head_dim: int
    dtype: str
    pattern: str = ""
    backends: Computed
    time_budget_s: float = 0.0
    memory_note: str
    rows: tuple[Length, ...]


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends in one step."""

    attention: int
    gradients: int


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What one rank sends in a step, by the window's length, and its peak memory in bytes."""

    rank: int
    process: str
    sent: dict[str, Sent]
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks that trained together; rank i holds the bytes from cuts[i] to cuts[i + 1] of a window."""

    world_size: int
    transport: str
    memory_note: str
    cuts: tuple[int, ...]
    by_rank: tuple[RankFacts, ...]

    def __post_init__(self) -> None:
        windows = {tuple(sorted(fact.sent)) for fact in self.by_rank}
        known = all(fact.rank in range(self.world_size) for fact in self.by_rank)
        if len(self.cuts) != self.world_size + 1 or len(windows) > 1 or not known:
            raise ValueError(f"by_rank: not the same windows on each of {self.world_size} ranks")

    @property
    def windows(self) -> list[str]:
        """The lengths of the windows that were trained on, in bytes."""
        return sorted({window for fact in self.by_rank for window in fact.sent}, key=lambda window: (len(window), window))


@dataclass(frozen=True, kw_only=True)
class DemoResult(Result):
    """A byte-level language model, trained on text, and its attention beside dense attention. `interrupted`: while doing what."""

    KIND: ClassVar[str] = "demo"

    text: TextFacts
    model: ModelFacts
    backend: Choice
    training: Training
    scaling: Scaling
    ranks: World | None = None
    interrupted: str | None

    def measurements(self) -> Iterator[Measurement]:
        for row in self.scaling.rows:
            for name, measured in (("dilated", row.dilated), ("dense", row.dense)):
                if measured is not None:
                    yield Measurement(f"{row.tokens:,} tokens: {name}", measured.samples)

    def problem_facts(self) -> dict[str, str]:
        return dict(pattern=self.model.pattern, heads=str(self.scaling.heads), head_dim=str(self.scaling.head_dim))
