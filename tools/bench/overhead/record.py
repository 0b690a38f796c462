"""The result of `dilkit bench --overhead`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dilkit.tools.results.problem import ProblemFacts
from dilkit.tools.results.record import Measurement, Result, Samples


@dataclass(frozen=True, kw_only=True)
class Calls:
    """One way of calling, through dilkit and directly, and what the first took longer: in the median of the differences of
    samples of the same round, so that a slow spell of the machine falls out, and between the fastest samples."""

    public: Samples
    direct: Samples
    overhead_s: float
    overhead_of_fastest_s: float

    @classmethod
    def of(cls, public: Samples, direct: Samples) -> Calls:
        """The overhead between samples that were taken in the same rounds."""
        differences = [a - b for a, b in zip(public.samples_s, direct.samples_s, strict=True)]
        fastest = min(public.samples_s) - min(direct.samples_s)
        return cls(public=public, direct=direct, overhead_s=statistics.median(differences), overhead_of_fastest_s=fastest)


@dataclass(frozen=True, kw_only=True)
class OverheadResult(Result):
    """What selection and the torch operator add to a call of a backend, by the way of calling."""

    KIND: ClassVar[str] = "overhead"

    problem: ProblemFacts
    seq: int
    backend: str
    modes: dict[str, Calls]

    def measurements(self) -> Iterator[Measurement]:
        for mode, calls in self.modes.items():
            yield Measurement(f"{mode}: dilkit", calls.public.samples_s)
            yield Measurement(f"{mode}: directly", calls.direct.samples_s)

    def problem_facts(self) -> dict[str, str]:
        return self.problem.words() | dict(backend=self.backend, seq=str(self.seq))
