"""One row of the suite of token orders: check everyone who takes part, then time those that are right, in turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dilkit.tools.bench.orders.checks import Finding
from dilkit.tools.bench.orders.peers import Array, Task, seconds
from dilkit.tools.measure import timing as measure
from dilkit.tools.results.decode import encode

TRIAL = 2048
"""Points of the calls that tell how many a candidate gets."""

Entry = dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """`make(count)` is the task for so many points; `check(count, result)` what is found of its result. `whole`: it gets all."""

    make: Callable[[int], Task]
    check: Callable[[int, Array], list[Finding]]
    whole: bool = True


@dataclass(frozen=True)
class Contest:
    """The method. `budget`: seconds of one call, beyond which a candidate gets fewer points; `min_time`: seconds of a sample."""

    repeats: int
    budget: float
    min_time: float

    def run(self, candidates: dict[str, Candidate], points: int) -> dict[str, Entry]:
        """An entry for each candidate, whatever became of it: "measured", "wrong" (a check failed) or "failed" (it raised)."""
        entries: dict[str, Entry] = {}
        calls: dict[str, Callable[[], Any]] = {}
        for name, candidate in candidates.items():
            entries[name], task = self._admit(candidate, points)
            if task:
                calls[name] = task.call
        for name, samples in measure.time_interleaved(calls, self.repeats, min_time=self.min_time).items():
            entries[name] |= dict(time=encode(samples), ns_per_point=1e9 * samples.median_s / entries[name]["points"])
        return entries

    def _admit(self, candidate: Candidate, points: int) -> tuple[Entry, Task | None]:
        """The beginning of an entry, and the task to be timed where the candidate is right."""
        try:
            count = points if candidate.whole else self._count(candidate, points)
            task = candidate.make(count)
            findings = candidate.check(count, task.result())
        except Exception as error:
            return dict(verdict="failed", reasons=[f"{type(error).__name__}: {error}"], check=[]), None
        if reasons := [f"not so: {found['what']}" for found in findings if not found["passed"]]:
            return dict(verdict="wrong", reasons=reasons, check=findings), None
        return dict(verdict="measured", reasons=[], check=findings, points=count), task

    def _count(self, candidate: Candidate, points: int) -> int:
        """As many points as the budget allows, going by calls with few of them."""
        few = min(TRIAL, points)
        return min(points, max(few, int(self.budget * few / seconds(candidate.make(few)))))
