"""One benchmark case of token orders: check every implementation, then time those that are right, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from dilkit.tools.bench.orders.peers import Array, Task, seconds
from dilkit.tools.console.text import error_line
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.results.kinds.orders import Finding, OrderEntries, OrderEntry

TRIAL = 2048
"""Points of the calls that say how many an implementation gets."""


@dataclass(frozen=True)
class OrderImplementation:
    """`make(count)` is the task for so many points; `check(count, result)` what is found of its result. `whole`: it gets all."""

    make: Callable[[int], Task]
    check: Callable[[int, Array], Iterable[Finding]]
    whole: bool = True


Implementations = dict[str, OrderImplementation]


@dataclass(frozen=True)
class OrderCaseRunner:
    """The method. `budget`: seconds of one call, beyond which an implementation gets fewer points; `min_time`: of a sample."""

    repeats: int
    budget: float
    min_time: float

    def run(self, implementations: Implementations, points: int) -> OrderEntries:
        """An entry for each implementation, whatever became of it."""
        admitted = {name: self._admit(one, points) for name, one in implementations.items()}
        calls = {name: task.call for name, (_, task) in admitted.items() if task}
        timed = time_interleaved(calls, self.repeats, min_time=self.min_time)
        entries = {name: entry for name, (entry, _) in admitted.items()}
        for name, samples in timed.items():
            entry = entries[name]
            entries[name] = replace(entry, time=samples, ns_per_point=1e9 * samples.median_s / entry.points)
        return entries

    def _admit(self, implementation: OrderImplementation, points: int) -> tuple[OrderEntry, Task | None]:
        """The beginning of an entry, and the task to be timed where the implementation is right."""
        try:
            count = points if implementation.whole else self._count(implementation, points)
            task = implementation.make(count)
            check = tuple(implementation.check(count, task.result()))
        except Exception as error:
            return OrderEntry(verdict="failed", reasons=(error_line(error),)), None
        if reasons := tuple(f"not so: {found.what}" for found in check if not found.passed):
            return OrderEntry(verdict="wrong", reasons=reasons, check=check), None
        return OrderEntry(check=check, points=count), task

    def _count(self, implementation: OrderImplementation, points: int) -> int:
        """As many points as the budget allows, going by calls with few of them."""
        few = min(TRIAL, points)
        return min(points, max(few, int(self.budget * few / seconds(implementation.make(few)))))
