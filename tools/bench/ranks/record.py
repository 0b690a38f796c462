"""The result of `dilkit bench --suite ring`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from dilkit.testing.accuracy import Check
from dilkit.tools.results.record import Case, Measurement, SuiteResult, of_case


@dataclass(frozen=True, kw_only=True)
class Step:
    """A measurement over ranks, which the transport moves rows between; `failed` is why there is none."""

    transport: str = ""
    failed: str | None = None


S = TypeVar("S", bound=Step)


@dataclass(frozen=True)
class Volumes:
    """Forward bytes of the busiest rank by the plan: by schedule for each number of ranks, and of a ring of all keys."""

    seq: int
    ranks: tuple[int, ...]
    schedules: dict[str, tuple[int, ...]]
    full_ring: tuple[int, ...]

    def __post_init__(self) -> None:
        if {len(counts) for counts in (*self.schedules.values(), self.full_ring)} != {len(self.ranks)}:
            raise ValueError(f"volumes: each schedule needs {len(self.ranks)} counts, one for each number of ranks")


@dataclass(frozen=True)
class Share:
    """Causal work of the busiest rank over the mean."""

    config: str
    ranks: int
    max_over_mean: float


@dataclass(frozen=True)
class Work:
    """How evenly work is shared out, by configuration and number of ranks."""

    calls: tuple[Share, ...]


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes that each rank sent in a call, beside those of the plan."""

    schedule: str
    sent_bytes: tuple[int, ...]
    planned_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SentCalls(Step):
    """Calls whose bytes were counted."""

    ranks: int = 0
    calls: tuple[Sent, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Results of all ranks beside those of one: the largest error over what is allowed, or whether all bits are the same."""

    schedule: str
    ratio: float | None = None
    bitwise: bool | None = None


@dataclass(frozen=True, kw_only=True)
class AgreementCalls(Step):
    """Calls whose results were compared."""

    ranks: int = 0
    calls: tuple[Agreement, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Fault(Step):
    """What became of a fault: the seconds until the last of the other ranks knew, and what they said."""

    kind: str = ""
    timeout: float = 0.0
    options: str = ""
    seconds: float = 0.0
    error: str = ""
    exit_code: int = 0
    left_behind: int = 0
    names_rank: bool = False
    names_step: bool = False

    @property
    def ranks_are(self) -> str:
        """The transport, with the launcher's options."""
        return " ".join(filter(None, (self.transport, self.options)))


@dataclass(frozen=True, kw_only=True)
class Memory(Step):
    """Peak bytes of each rank, and what a rank's part of the tensors alone takes. `config`: empty at fixed tokens a rank."""

    config: str = ""
    seq: int = 0
    ranks: int = 1
    threads: int = 1
    peak_bytes: tuple[int, ...] = ()
    tensors_bytes: int = 0

    def __post_init__(self) -> None:
        if self.failed is None and not self.peak_bytes:
            raise ValueError("peak_bytes: empty; a number of bytes for each rank is needed")

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs most."""
        return max(self.peak_bytes)


@dataclass(frozen=True, kw_only=True)
class Race(Step, Case):
    """Ranks of one thread each ("ranks"), and one rank of several ("one rank"), timed in turns."""

    ranks: int = 0
    one_rank_threads: int = 0
    check: tuple[Check, ...] = ()


@dataclass(frozen=True)
class Wait:
    """A stretch of time that a rank spent in its transport, in seconds from the common start."""

    begin: float
    end: float
    step: str = ""


@dataclass(frozen=True)
class RankTime:
    """A rank's time for one step, and what of it was spent in the transport."""

    seconds: float
    waits: tuple[Wait, ...]


@dataclass(frozen=True, kw_only=True)
class Timeline(Step):
    """One forward and backward pass, rank by rank."""

    seq: int = 0
    ranks: tuple[RankTime, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Million(Step):
    """Forward bytes by rank of one million tokens, planned and, where there was time, counted in a run; else `why` not."""

    seq: int = 0
    ranks: int = 0
    planned_bytes: tuple[int, ...] = ()
    sent_bytes: tuple[int, ...] | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class RanksResult(SuiteResult):
    """Attention over ranks: bytes, agreement with one rank, memory, time and faults."""

    KIND: ClassVar[str] = "suite-ring"

    mpi: str | None = None
    processes: tuple[str, ...] = ()
    volumes: tuple[Volumes, ...] = ()
    work: tuple[Work, ...] = ()
    bytes: tuple[SentCalls, ...] = ()
    agreement: tuple[AgreementCalls, ...] = ()
    faults: tuple[Fault, ...] = ()
    memory: tuple[Memory, ...] = ()
    growth: tuple[Memory, ...] = ()
    race: tuple[Race, ...] = ()
    timeline: tuple[Timeline, ...] = ()
    million: tuple[Million, ...] = ()

    def failures(self) -> Iterator[tuple[str, str]]:
        """(the list, why) of each measurement that failed."""
        lists = ("bytes", "agreement", "faults", "memory", "growth", "race", "timeline", "million")
        return ((name, step.failed) for name in lists for step in getattr(self, name) if step.failed is not None)

    def measurements(self) -> Iterator[Measurement]:
        for race in good(self.race):
            yield from of_case(f"race, {race.ranks} ranks, {race.transport}", race)


def good(steps: tuple[S, ...]) -> list[S]:
    """The steps that did not fail."""
    return [step for step in steps if step.failed is None]
