"""The result of `dilkit gpu-day`: what each step found, of which inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from dilkit.selection.tuned_file import TunedSetup, TunedShape
from dilkit.tools.results.record import Entries, Figure, Measurement, Result

STAGES = ("correctness", "speed", "preferences")
"""Is it right; how fast is it; which rows of the preference table are wrong."""
TITLES = {"correctness": "Is it right", "speed": "How fast", "preferences": "Which rows of the preference table are wrong"}
ENDINGS = ("done", "failed", "late", "cut")
"""How a step ends: by itself; with an error; at its own deadline; at that of its stage, so that the next run repeats it."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a step looked at.

    `backend` and `dtype` of what is wrong say what is not timed: all dtypes where that is empty. `numbers` are by name.
    """

    what: str
    verdict: Literal["right", "wrong", "absent", "noted"]
    found: str = ""
    backend: str = ""
    dtype: str = ""
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A problem of the sweep: the backend that the preference table picks by its row `row`, beside what was measured."""

    problem: str
    shape: TunedShape
    row: str
    picked: str
    entries: Entries

    @property
    def seconds(self) -> dict[str, float]:
        """The median time of each backend that was measured, the fastest first."""
        medians = {name: entry.time.median_s for name, entry in self.entries.items() if entry.time}
        return dict(sorted(medians.items(), key=lambda pair: pair[1]))

    @property
    def ratio(self) -> float | None:
        """The time of the picked backend over that of the fastest; None where the picked one was not measured."""
        seconds = self.seconds
        return seconds[self.picked] / min(seconds.values()) if self.picked in seconds else None


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a step has found so far; `suite` is its part of the GPU suite."""

    findings: tuple[Finding, ...] = ()
    choices: tuple[Choice, ...] = ()
    suite: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A step that was run. `inputs` is a digest of all that its result depends on: with other inputs it is run again.

    `backend`: the one that is wrong if the step did not come to its end.
    """

    stage: str
    name: str
    what: str
    inputs: str
    ended: str
    seconds: float
    reasons: tuple[str, ...] = ()
    found: Found = field(default_factory=Found)
    backend: str = ""

    def __post_init__(self) -> None:
        if self.stage not in STAGES or self.ended not in ENDINGS:
            raise ValueError(f"stage={self.stage[:20]!r}, ended={self.ended[:20]!r}; known: {', '.join((*STAGES, *ENDINGS))}")

    @property
    def wrong(self) -> bool:
        """Whether it found something wrong, or did not come to its end."""
        return self.ended in ("failed", "late") or any(one.verdict == "wrong" for one in self.found.findings)


@dataclass(frozen=True, kw_only=True)
class GpuDayResult(Result):
    """All steps that were run, in the order in which they were; `plan` names all that there are, as (stage, name).

    `rehearsal`: the steps ran on the CPU, at small sizes. `setup` is what the sweep's times hold for.
    """

    KIND: ClassVar[str] = "gpu-day"

    rehearsal: bool
    setup: TunedSetup
    plan: tuple[tuple[str, str], ...]
    steps: tuple[StepRecord, ...] = ()
    suite: dict[str, Any] | None = None
    figures: tuple[Figure, ...] = ()

    @property
    def left(self) -> tuple[tuple[str, str], ...]:
        """The steps that have not been run to an end of their own."""
        there = {(step.stage, step.name) for step in self.steps if step.ended != "cut"}
        return tuple(key for key in self.plan if key not in there)

    def of(self, stage: str) -> list[StepRecord]:
        """The steps of a stage that were run."""
        return [step for step in self.steps if step.stage == stage]

    @property
    def choices(self) -> list[Choice]:
        """The problems of the sweep that were measured."""
        return [choice for step in self.steps for choice in step.found.choices]

    @property
    def wrong(self) -> tuple[tuple[str, str], ...]:
        """(backend, dtype) of what is wrong by the first stage; an empty dtype stands for all."""
        steps = self.of("correctness")
        named = {(one.backend, one.dtype) for step in steps for one in step.found.findings if one.verdict == "wrong"}
        ended = {(step.backend, "") for step in steps if step.ended in ("failed", "late")}
        return tuple(sorted((backend, dtype) for backend, dtype in named | ended if backend))

    def measurements(self) -> Iterator[Measurement]:
        for choice in self.choices:
            for name, entry in choice.entries.items():
                if entry.time:
                    yield Measurement(f"{choice.problem}: {name}", entry.time.samples_s)
