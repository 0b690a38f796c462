"""The result of `dilkit bench --suite orders`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dilkit.tools.results.record import Measurement, Samples, SuiteResult

OURS = "dilkit"


@dataclass(frozen=True)
class Finding:
    """What was checked of a curve, and whether it was so."""

    what: str
    passed: bool


@dataclass(frozen=True, kw_only=True)
class OrderEntry:
    """What became of one implementation: "measured", "wrong" (a check failed) or "failed" (it raised).

    A measured one has the time that so many `points` take: of a slow one they are fewer than the case has.
    """

    verdict: str = "measured"
    reasons: tuple[str, ...] = ()
    check: tuple[Finding, ...] = ()
    points: int = 0
    time: Samples | None = None

    @property
    def ns(self) -> tuple[float, ...]:
        """Nanoseconds a point, by sample; none where it was not measured."""
        return tuple(1e9 * sample / self.points for sample in self.time.samples_s) if self.time else ()

    @property
    def ns_per_point(self) -> float | None:
        """Their median."""
        return 1e9 * self.time.median_s / self.points if self.time else None


OrderEntries = dict[str, OrderEntry]


@dataclass(frozen=True, kw_only=True)
class OrderCase:
    """A benchmark case: so many points, and the implementations that computed the same for them.

    Of a `grid` the permutation of its cells in a `dtype`, or without one its inverse, the ranks. Of random points with
    coordinates of so many `bits`: `what` is "encode" or "decode", and empty where they are sorted.
    """

    points: int
    entries: OrderEntries
    grid: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    what: str = ""
    ndim: int = 0
    bits: int = 0

    @property
    def short(self) -> str:
        """The size of the grid, or of coordinates."""
        return size(self.shape) if self.grid else f"{self.bits} bits"

    @property
    def title(self) -> str:
        """What is computed, and of what."""
        if self.grid:
            return f"permutation, {self.short}, {self.dtype}" if self.dtype else f"rank, {self.short}, int32"
        return f"{self.what or 'sort'}, {self.ndim}-D, {self.short}"

    def over(self, name: str, other: str = OURS) -> float | None:
        """The time a point of `name` over that of `other`; None where one of them was not measured.

        The median over the rounds: in a round both were disturbed alike.
        """
        both = [self.entries[who].ns for who in (name, other) if who in self.entries and self.entries[who].time]
        return statistics.median(a / b for a, b in zip(*both, strict=True)) if len(both) == 2 else None


@dataclass(frozen=True, kw_only=True)
class OrderCall:
    """Calls of `order`: `times` with an empty cache, for the permutation, and for it and its inverse; `time` from the cache."""

    grid: str
    shape: tuple[int, ...]
    check: tuple[Finding, ...] = ()
    times: dict[str, Samples] = field(default_factory=dict)
    time: Samples | None = None


@dataclass(frozen=True)
class Near:
    """The distance to the nearest kept key, in cells."""

    mean: float
    max: float


@dataclass(frozen=True, kw_only=True)
class Locality:
    """Distances to the nearest kept key by curve and, as text, by dilation rate."""

    shape: tuple[int, ...]
    segment_length: int
    dilation_rates: tuple[int, ...]
    nearest_kept: dict[str, dict[str, Near]]


@dataclass(frozen=True, kw_only=True)
class Package:
    """Another package with a Hilbert curve: what it computes, its version, and why it is absent where it is."""

    name: str
    summary: str
    version: str | None
    absent: str | None


@dataclass(frozen=True, kw_only=True)
class OrdersResult(SuiteResult):
    """Token orders on one thread, beside a store loop and other packages."""

    KIND: ClassVar[str] = "suite-orders"

    isa: str
    packages: tuple[Package, ...]
    permutations: tuple[OrderCase, ...] = ()
    ranks: tuple[OrderCase, ...] = ()
    points: tuple[OrderCase, ...] = ()
    sorts: tuple[OrderCase, ...] = ()
    cold: tuple[OrderCall, ...] = ()
    warm: tuple[OrderCall, ...] = ()
    locality: tuple[Locality, ...] = ()

    @property
    def cases(self) -> tuple[OrderCase, ...]:
        """All cases in which packages take part."""
        return (*self.permutations, *self.ranks, *self.points, *self.sorts)

    def measurements(self) -> Iterator[Measurement]:
        for case in self.cases:
            for name, entry in case.entries.items():
                if entry.time:
                    yield Measurement(f"{case.title}, a million points: {name}", tuple(ns / 1e3 for ns in entry.ns))
        for cold in self.cold:
            for what, samples in cold.times.items():
                yield Measurement(f"cold order, {size(cold.shape)}: {what}", samples.samples_s)
        for warm in self.warm:
            if warm.time:
                yield Measurement(f"warm order, {size(warm.shape)}", warm.time.samples_s)


def size(shape: Sequence[int]) -> str:
    """The sides of a grid."""
    return " x ".join(map(str, shape))
