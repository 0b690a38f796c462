"""The typed records that results of several kinds are made of. Times are in seconds, memory is in bytes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dilkit.testing.accuracy import Check


@dataclass(frozen=True)
class Samples:
    """Every sample of one function, in seconds a call, in the order taken; a sample is the mean over `calls_per_sample` calls."""

    median_s: float
    samples_s: tuple[float, ...]
    calls_per_sample: int = 1

    def __post_init__(self) -> None:
        if not self.samples_s or min(self.samples_s) <= 0:
            raise ValueError(f"samples_s: {len(self.samples_s)} samples; one at least is needed, and all must be positive")

    @classmethod
    def of(cls, seconds: Sequence[float], calls: int = 1) -> Samples:
        """Return samples with their median."""
        return cls(statistics.median(seconds), tuple(seconds), calls)


@dataclass(frozen=True, kw_only=True)
class MatmulRate(Samples):
    """torch's product of two square matrices: a yardstick."""

    gflops: float
    size: int = 0
    dtype: str = ""


@dataclass(frozen=True, kw_only=True)
class CopyRate(Samples):
    """A copy in memory, in GB/s of what is read and written: a yardstick."""

    gb_per_s: float
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class FmaRate(Samples):
    """Fused multiply-adds in registers on all threads: a yardstick. `gflops` is of the median."""

    gflops: float


@dataclass(frozen=True)
class Difference:
    """The function that an implementation computes in place of the pattern's attention, and the distance of its results.

    The largest difference by itself, and in units of the largest exact value.
    """

    computes: str
    out_relative: float
    dquery_relative: float | None = None
    out_max_abs: float | None = None
    dquery_max_abs: float | None = None


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The route of each branch between ranks; by rank, the bytes sent and planned, and the query-key pairs computed."""

    routes: tuple[str, ...] = ()
    planned_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    work: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The outcome of one implementation in a benchmark case.

    `verdict` is "measured", "absent" (not installed), "refused", "skipped" (over the budget), "wrong" (a check failed) or
    "failed" (raised). Only a measured one has a time. FLOPs are the nominal ones of what it computes. `peak_bytes` are those
    beyond the inputs, `memory_bytes` count the inputs too.
    """

    verdict: str = "measured"
    reasons: tuple[str, ...] = ()
    check: tuple[Check, ...] = ()
    differs: Difference | None = None
    time: Samples | None = None
    flops: float | None = None
    peak_bytes: int | None = None
    memory_bytes: int | None = None
    forward_peak_bytes: int | None = None
    memory_note: str | None = None
    ranks: Exchange | None = None

    @property
    def seconds(self) -> tuple[float, ...]:
        """The samples; none where it was not measured."""
        return self.time.samples_s if self.time else ()


Entries = dict[str, Entry]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Facts on which a figure depends besides the problem."""

    device: str
    device_name: str
    features: tuple[str, ...] = ()
    memory_bytes: int | None = None
    capability: str | None = None
    cuda: str | None = None
    cpu: str
    cores: int
    threads: int
    system: str
    python: str
    torch: str
    numpy: str
    dilkit: str
    git_revision: str | None
    git_dirty: bool | None


@dataclass(frozen=True)
class Measurement:
    """Samples in seconds, with words that are the same in every file that has them."""

    what: str
    samples: tuple[float, ...]
    yardstick: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one run of a command: one JSON file. Every published figure is read out of one."""

    KIND: ClassVar[str]
    SCHEMA: ClassVar[int] = 1
    """The schema of its files; those of an earlier one are refused."""

    schema: int = 1
    kind: str
    command: str
    date: str
    environment: Environment

    def measurements(self) -> Iterator[Measurement]:
        """Yield every list of samples."""
        return iter(())

    def problem_facts(self) -> dict[str, str]:
        """Return facts of the problem: where two results differ in them, their figures are of different problems."""
        return {}
