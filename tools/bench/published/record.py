"""The result of `dilkit bench --suite seeds`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.testing.accuracy import Check
from dilkit.tools.results.record import Case, Entry, Measurement, SuiteResult, of_case

HEAD_DIM = 64
PASSES = ("forward", "forward + backward")
"""Those of a call without a backward pass, and with one."""
TWINS = ("float32", "bfloat16")
"""Implementations that are the automatic choice with tensors of another dtype than the setting's."""


@dataclass(frozen=True)
class Setting:
    """What a published table was measured at: `batch` sequences of `seq` tokens, sharded over so many ranks."""

    seq: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    batch: int = 1
    heads: int = 8
    dtype: str = "float32"
    ranks: int = 1

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else ""
        lengths, rates = ("-".join(map(str, numbers)) for numbers in (self.segment_lengths, self.dilation_rates))
        ranks = f", {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{batch}{self.seq:,} tokens, {self.heads} heads, {self.dtype}, w {lengths}, r {rates}{ranks}"

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.batch * self.seq

    def problem(self, backward: bool = False, divisor: int = 1) -> Problem:
        """What is computed at the setting, its lengths divided."""
        s = self.divided(divisor)
        return Problem(
            pattern=Pattern(s.segment_lengths, s.dilation_rates),
            seq=s.seq,
            batch=s.batch,
            heads=s.heads,
            head_dim=HEAD_DIM,
            dtype=s.dtype,
            requires_grad=backward,
        )

    def divided(self, by: int) -> Setting:
        """The setting with lengths divided by `by`; rates stay, and no segment is shorter than its rate."""
        pairs = zip(self.segment_lengths, self.dilation_rates, strict=True)
        return replace(self, seq=self.seq // by, segment_lengths=tuple(max(w // by, r) for w, r in pairs))


@dataclass(frozen=True, kw_only=True)
class PublishedCase(Case):
    """Implementations at a setting; `tokens` and `seq` are those that were measured, shorter ones with --quick.

    Over ranks: "ranks", and "one rank" that has all cores, timed in turns; `peak_bytes` of each rank, inputs counted. Of the
    cache: a call whose plan is there, "auto", and one for which it is made anew, "no cache".
    """

    setting: Setting
    backward: bool = False
    tokens: int = 0
    seq: int = 0
    output_bytes: int = 0
    transport: str = ""
    check: tuple[Check, ...] = ()
    peak_bytes: tuple[int, ...] | None = None
    memory_note: str | None = None

    @property
    def peak(self) -> int | None:
        """Bytes of the rank that needs most."""
        return max(self.peak_bytes) if self.peak_bytes else None


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one job of several ranks measured, or why it failed."""

    ranks: int
    transport: str
    rows: tuple[PublishedCase, ...] = ()
    failed: str | None = None


@dataclass(frozen=True)
class Trial:
    """A length that was tried, with the peak bytes of a call and its seconds; None where the device had no such room."""

    seq: int
    bytes: int | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Longest:
    """The longest sequence of which a call fits into so many bytes. `stopped`: why there may be longer ones."""

    who: str
    backward: bool
    limit_bytes: int
    setting: Setting | None = None
    seq: int | None = None
    tried: tuple[Trial, ...] = ()
    stopped: str | None = None


@dataclass(frozen=True, kw_only=True)
class PublishedFigure:
    """A published figure beside the same quantity here.

    `ours` is None where there is no figure, and `why` says why; of a longest sequence, in what memory. `per_tflops`: `ours` on a
    machine of one TFLOP/s, going by the matmul measured beside it; None of what does not depend on speed.
    """

    document: str
    figure: str
    claimed: float
    quantity: str
    note: str
    hardware: str
    ours: float | None = None
    per_tflops: float | None = None
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class PublishedResult(SuiteResult):
    """The tables that older implementations published, measured again."""

    KIND: ClassVar[str] = "suite-seeds"

    mpi: str = ""
    processes: tuple[str, ...] = ()
    cases: tuple[PublishedCase, ...] = ()
    cache: tuple[PublishedCase, ...] = ()
    ranks: tuple[Job, ...] = ()
    growth: tuple[Job, ...] = ()
    longest: tuple[Longest, ...] = ()
    figures: tuple[PublishedFigure, ...] = ()  # type: ignore[assignment]  # no targets: what others measured elsewhere

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Those at a fixed length, and those at fixed tokens a rank."""
        return (*self.ranks, *self.growth)

    def case(self, setting: Setting, backward: bool = False) -> PublishedCase | None:
        """The case of a setting; None where it was not measured."""
        return next((case for case in self.cases if (case.setting, case.backward) == (setting, backward)), None)

    def entry(self, setting: Setting, who: str, backward: bool = False) -> Entry | None:
        """Of an implementation at a setting; None where it was not timed."""
        case = self.case(setting, backward)
        return case.entries[who] if case and case.timed(who) else None

    def measurements(self) -> Iterator[Measurement]:
        for case in self.cases:
            yield from of_case(f"{case.setting}, {PASSES[case.backward]}", case)
        for cached in self.cache:
            yield from of_case(f"cache of plans, {cached.setting}", cached)
        for name, jobs in (("fixed length", self.ranks), ("fixed tokens a rank", self.growth)):
            for row in (row for job in jobs for row in job.rows):
                yield from of_case(f"{name}, {row.setting}, {row.transport}, {PASSES[row.backward]}", row)
