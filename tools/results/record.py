"""The typed records that results are made of. Times are in seconds, memory is in bytes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dilkit.testing.accuracy import Check


@dataclass(frozen=True)
class Samples:
    """Samples of one function, in seconds a call, in the order taken; each is the mean over `calls_per_sample` calls."""

    median_s: float
    samples_s: tuple[float, ...]
    calls_per_sample: int = 1

    @classmethod
    def of(cls, seconds: Sequence[float], calls: int = 1) -> Samples:
        """Return samples with their median."""
        return cls(statistics.median(seconds), tuple(seconds), calls)


@dataclass(frozen=True)
class Yardstick:
    """A limit of the machine, timed beside implementations: its rate (`gflops` or `gb_per_s`) and sizes."""

    time: Samples
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The outcome of one implementation in a benchmark case.

    `verdict` is "measured", "absent" (not installed), "refused", "skipped" (over the budget), "wrong" (a check failed) or
    "failed" (raised). Only a measured one has a time. FLOPs are the nominal ones of what it computes. `peak_bytes` are those
    beyond the inputs, `memory_bytes` count the inputs too. `differs`: another function that is computed, and how far it is from
    the pattern's attention. `ranks`: by rank, bytes sent and planned, and pairs computed.
    """

    verdict: str = "measured"
    reasons: tuple[str, ...] = ()
    check: tuple[Check, ...] = ()
    differs: dict[str, Any] | None = None
    time: Samples | None = None
    flops: float | None = None
    peak_bytes: int | None = None
    memory_bytes: int | None = None
    forward_peak_bytes: int | None = None
    memory_note: str | None = None
    ranks: dict[str, Any] | None = None

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
    """The result of one run of a command: one JSON file. Files of another schema are refused."""

    KIND: ClassVar[str]
    SCHEMA: ClassVar[int] = 1

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
