"""One benchmark case of token orders: check every implementation, then time those that are right, in turns."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dilkit.tools.bench.orders.implementations import Implementations, OrderImplementation
from dilkit.tools.bench.orders.peers import Task
from dilkit.tools.console.text import error_line
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.results.kinds.orders import OrderEntries, OrderEntry

TRIAL = 2048
"""Points of the calls that say how many an implementation gets."""


@dataclass(frozen=True)
class OrderCaseRunner:
    """The method. `budget`: seconds of one call, beyond which an implementation gets fewer points; `min_time`: of a sample."""

    repeats: int
    budget: float
    min_time: float

    def run(self, implementations: Implementations, points: int) -> OrderEntries:
        """An entry for each implementation, whatever became of it."""
        entries, calls = {}, {}
        for name, one in implementations.items():
            entries[name], task = self._admit(one, points)
            if task:
                calls[name] = task.call
        for name, samples in time_interleaved(calls, self.repeats, min_time=self.min_time).items():
            per_point = 1e9 * samples.median_s / entries[name].points
            entries[name] = replace(entries[name], time=samples, ns_per_point=per_point)
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
        return min(points, max(few, int(self.budget * few / implementation.make(few).seconds())))
