"""The result of `dilkit bench` on a problem of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dilkit.tools.results.problem import ProblemFacts
from dilkit.tools.results.record import Case, Entry, Measurement, Result, of_case
from dilkit.tools.results.statistics import exponent


@dataclass(frozen=True, kw_only=True)
class BenchCase(Case):
    """Implementations at one length. `output_bytes`: the size of one tensor shaped like the output."""

    seq: int
    output_bytes: int

    def measured(self) -> dict[str, Entry]:
        """The entries with times."""
        return {name: entry for name, entry in self.entries.items() if entry.time}


@dataclass(frozen=True, kw_only=True)
class Method:
    """How it was measured: samples of each implementation, seconds that one lasts at least, seconds that a call may take."""

    repeats: int
    min_time_s: float
    budget_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Described:
    """An implementation in words; `kind` is "backend", "baseline", "peer" or "schedule"."""

    name: str
    kind: str = ""
    summary: str = ""
    computes: str | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """The ranks of a job: what started them, what moves the rows, how many they are, and the threads of each."""

    comm: str = ""
    transport: str
    world_size: int
    threads: int


@dataclass(frozen=True)
class Growth:
    """How time grows with the length: `time ~ seq**exponent`, fitted over so many lengths, and the same of nominal FLOPs."""

    exponent: float
    flops_exponent: float
    lengths: int


@dataclass(frozen=True, kw_only=True)
class BenchResult(Result):
    """Implementations over lengths; with `ranks`, schedules of exchange of a sequence that is sharded over them."""

    KIND: ClassVar[str] = "bench"

    problem: ProblemFacts
    method: Method
    implementations: tuple[Described, ...] = field(default=(), metadata={"name": "contestants"})
    lengths: tuple[BenchCase, ...]
    scaling: dict[str, Growth] = field(default_factory=dict)
    interrupted: bool = False
    ranks: Job | None = None

    def measurements(self) -> Iterator[Measurement]:
        for case in self.lengths:
            yield from of_case(f"{case.seq:,} tokens", case)

    def problem_facts(self) -> dict[str, str]:
        ranks = {f"ranks: {name}": str(value) for name, value in vars(self.ranks).items()} if self.ranks else {}
        return self.problem.words() | ranks


def scaling(cases: Sequence[BenchCase]) -> dict[str, Growth]:
    """The growth of each implementation that was measured at two lengths or more."""
    exponents = {}
    for name in dict.fromkeys(name for case in cases for name in case.entries):
        points = [
            (case.seq, entry.time.median_s, entry.flops or 0.0)
            for case in cases
            if (entry := case.entries.get(name)) and entry.time
        ]
        seqs, times, flops = (list(values) for values in zip(*points, strict=True)) if points else ([], [], [])
        if len(set(seqs)) > 1:
            exponents[name] = Growth(exponent(seqs, times), exponent(seqs, flops), len(seqs))
    return exponents
