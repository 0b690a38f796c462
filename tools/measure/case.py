"""One length of a benchmark: check every implementation, time those that are right side by side, then measure their memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

from dilkit.pattern import Pattern
from dilkit.problem import DTYPE_BYTES, Problem
from dilkit.testing import memory
from dilkit.testing.accuracy import shortened
from dilkit.testing.tensors import Tensors
from dilkit.tools.console.text import error_line
from dilkit.tools.measure import correctness
from dilkit.tools.measure.ceilings import Ceilings, MultiplyAdds, Rates
from dilkit.tools.measure.implementation import Implementation
from dilkit.tools.measure.timing import Call, time_interleaved
from dilkit.tools.results.record import Entries, Entry, Samples


@dataclass
class CaseRunner:
    """Implementations, the method, and how long each took at earlier lengths, which says how long the next one will take.

    `budget` is the longest that one call may be expected to take, in seconds; `say(text)` is called with what comes next.
    `dtypes` are those of implementations that get another than the problem's, `matmul_dtype` is that of the yardstick where it
    is another. With a backward pass, memory is also that of the forward pass alone where `forward_memory` says so.
    """

    implementations: Sequence[Implementation]
    repeats: int = 7
    min_time: float = 0.05
    budget: float = 20.0
    say: Callable[[str], Any] = lambda text: None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    matmul_dtype: str | None = None
    forward_memory: bool = True
    last: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Work (in any unit) and seconds of one call of each implementation at the last length it was measured at."""

    def run(self, problem: Problem) -> CaseFields:
        """Everything measured at the length of `problem`: an entry for each implementation, whatever became of it."""
        problems = {i.name: replace(problem, dtype=self.dtypes.get(i.name, problem.dtype)) for i in self.implementations}
        inputs = {own: Tensors.random(own) for own in dict.fromkeys(problems.values())}
        entries = {i.name: self._admit(i, problems[i.name], inputs[problems[i.name]]) for i in self.implementations}
        able = [i for i in self.implementations if entries[i.name].verdict == "measured"]
        self.say(f"{problem.seq:,} tokens: time")
        ceilings = Ceilings(self.matmul_dtype or problem.dtype, problem.device.type)
        for warm_up in ceilings.calls.values():  # implementations were called to be admitted
            warm_up()
        calls = {i.name: partial(i.once, inputs[problems[i.name]], problems[i.name]) for i in able}
        time = partial(time_interleaved, repeats=self.repeats, warmup=0, min_time=self.min_time, device=problem.device.type)
        fields = side_by_side(entries, calls, {i.name: i.flops(problem) for i in able}, ceilings, time)
        for i in able:
            own, entry = problems[i.name], fields["entries"][i.name]
            self.say(f"{problem.seq:,} tokens: memory of {i.name}")
            self.last[i.name] = _work(i, own), statistics.median(entry.seconds)
            fields["entries"][i.name] = _with_memory(entry, i, own, inputs[own], self.forward_memory)
        return fields

    def _admit(self, implementation: Implementation, problem: Problem, inputs: Tensors) -> Entry:
        """As `admit`; whoever computes another function than the pattern's attention is compared with that."""
        self.say(f"{problem.seq:,} tokens: check of {implementation.name}")
        expected = partial(self._expected_seconds, implementation, problem)
        entry = admit(implementation, problem, inputs, self.budget, expected)
        if entry.verdict != "measured":
            return entry
        try:
            seconds = 0.0 if implementation.name in self.last else _seconds(implementation, inputs, problem)
            if seconds > self.budget:
                return replace(entry, verdict="skipped", reasons=(over_budget("took", seconds, self.budget),))
            return replace(entry, differs=correctness.difference(implementation, problem, inputs))
        except Exception as error:
            return failed(error)

    def _expected_seconds(self, implementation: Implementation, problem: Problem) -> float:
        """From the last length measured; at the first, quadratic work from the shortened problem, and 0 for all others."""
        if implementation.name in self.last:
            work, seconds = self.last[implementation.name]
            return seconds * _work(implementation, problem) / work
        short = shortened(problem)
        if not implementation.quadratic or implementation.refusals(short):
            return 0.0
        call = partial(implementation.once, Tensors.random(short), short)
        timed = time_interleaved({"": call}, repeats=3, device=problem.device.type)[""]
        return timed.median_s * _work(implementation, problem) / _work(implementation, short)


def admit(
    implementation: Implementation, problem: Problem, inputs: Tensors, budget: float, expected: Callable[[], float]
) -> Entry:
    """The beginning of an entry: its verdict, with the reasons or the check that it rests on.

    `expected()` is how many seconds a call may take; more than `budget` seconds are not spent on one.
    """
    if reasons := implementation.refusals(problem):
        return Entry(verdict="refused", reasons=tuple(reasons))
    try:
        if (seconds := expected()) > budget:
            return Entry(verdict="skipped", reasons=(over_budget("would take", seconds, budget),))
        checks = correctness.check(implementation.checked or implementation, problem, inputs)
    except Exception as error:  # out of memory, a kernel that does not build: the others go on
        return failed(error)
    wrong = tuple(check.complaint for check in checks if not check.passed)
    return Entry(verdict="wrong" if wrong else "measured", reasons=wrong, check=checks)


def failed(error: Exception) -> Entry:
    """The entry of an implementation that raised."""
    return Entry(verdict="failed", reasons=(error_line(error),))


def _seconds(implementation: Implementation, inputs: Tensors, problem: Problem) -> float:
    """Of one call."""
    start = perf_counter()
    implementation.once(inputs, problem)
    return perf_counter() - start


def _work(implementation: Implementation, problem: Problem) -> float:
    """Nominal FLOPs; where the work is quadratic whatever the pattern, those of dense attention."""
    dense = replace(problem, pattern=Pattern.dense()) if implementation.quadratic else problem
    return max(1.0, implementation.flops(dense))


def over_budget(verb: str, seconds: float, budget: float) -> str:
    """Why a call is not measured, and the option that measures it."""
    return f"one call {verb} about {seconds:.3g} s; the budget is {budget:g} s (--budget {-(-seconds // 1):.0f} measures it)"


def output_bytes(problem: Problem) -> int:
    """Size of one tensor shaped like the output: the unit in which memory is easiest to judge."""
    return problem.batch * problem.seq * problem.heads * problem.head_dim * DTYPE_BYTES[problem.dtype]


def results_bytes(problem: Problem) -> int:
    """Size of out and lse."""
    return output_bytes(problem) + 4 * problem.batch * problem.heads * problem.seq


class CaseFields(Rates):
    """The fields of a benchmark case: its yardsticks, and the entries."""

    entries: Entries


def side_by_side(
    entries: Entries,
    calls: Mapping[str, Call],
    flops: Mapping[str, float],
    ceilings: MultiplyAdds,
    time: Callable[[Mapping[str, Call]], dict[str, Samples]],
) -> CaseFields:
    """Time the calls together with the ceilings; those of `entries` that have a call get its time and nominal FLOPs."""
    timed = time({**ceilings.calls, **calls})
    fast = {name: replace(entries[name], time=timed[name], flops=flops[name]) for name in calls}
    return CaseFields(**ceilings.rates(timed), entries=entries | fast)


def _with_memory(entry: Entry, implementation: Implementation, problem: Problem, inputs: Tensors, forward: bool) -> Entry:
    """`entry` with the peak extra bytes of a call, and with `forward` of its forward pass alone; or why they are not known."""
    device = problem.device.type
    try:
        peak = memory.peak_memory(partial(implementation.once, inputs, problem), device)
        alone = None
        if forward and problem.requires_grad:
            alone = memory.peak_memory(partial(implementation.attend, inputs, problem), device)
    except memory.MeasureError as error:
        return replace(entry, memory_note=str(error))
    return replace(entry, peak_bytes=peak, forward_peak_bytes=alone)
