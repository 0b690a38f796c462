"""Measures a case: checks every implementation, times those that are right in turns, then measures their memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from dilkit.pattern import Pattern
from dilkit.problem import DTYPE_BYTES, Problem
from dilkit.testing import memory
from dilkit.testing.accuracy import Check, Expected, Results, exact_rows, expected, expected_rows, shortened
from dilkit.testing.poison import poisoned_memory
from dilkit.testing.tensors import Tensors
from dilkit.tools.console.text import error_line
from dilkit.tools.measure.ceilings import Ceilings
from dilkit.tools.measure.implementation import Implementation
from dilkit.tools.measure.timing import Call, clock_of, time_interleaved
from dilkit.tools.results.rows import NOTHING, Entries, ResultRow

AGREEMENT = 1e-4
"""Largest difference that two ways of computing may have in fp32, in units of the largest value."""
Posed = Mapping[str, tuple[Implementation, Problem]]
"""Implementations by name, each with the problem that it computes."""
ROWS = 16
"""Random rows that are checked at the real length, beside the first."""
Timer = Callable[[Mapping[str, Call]], dict[str, ResultRow]]
"""A function that times calls in turns, all of which were called before."""


UNTIMED = ResultRow()
CaseFields = dict[str, Any]
"""A benchmark case: `entries`, and yardsticks by name."""


@dataclass
class CaseRunner:
    """Implementations, the method, and how long each took at earlier lengths, by which the next ones are expected to last.

    `budget`: seconds that one call may be expected to take; `matmul_dtype`: another dtype than the problem's, "" for no matmul.
    """

    implementations: Sequence[Implementation]
    repeats: int = 7
    min_time: float = 0.05
    budget: float = 20.0
    matmul_dtype: str | None = None
    last: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Work (in any unit) and seconds of one call of each implementation at the last length it was measured at."""

    def run(self, problem: Problem) -> CaseFields:
        """Measure at the length of `problem`: an entry for each implementation, whatever became of it."""
        device = problem.device.type
        posed = {one.name: (one, problem) for one in self.implementations}
        timer = partial(time_interleaved, repeats=self.repeats, warmup=0, min_time=self.min_time, device=device)
        ceilings = partial(Ceilings, problem.dtype if self.matmul_dtype is None else self.matmul_dtype, device)
        fields = compare(posed, timer, ceilings, self._admit, memory_too=True)
        for name, entry in fields["entries"].items():
            if entry.samples:
                self.last[name] = _work(*posed[name]), entry.median_s
        return fields

    def _admit(self, implementation: Implementation, problem: Problem, inputs: Tensors) -> ResultRow:
        """Admit an implementation; one of another function than the pattern's attention is compared with that too."""
        entry = admit(implementation, problem, inputs, self.budget, partial(self._expected_seconds, implementation, problem))
        if entry.verdict != "measured":
            return entry
        try:
            if implementation.name not in self.last:
                call = partial(implementation.once, inputs, problem)
                if (seconds := clock_of(problem.device.type)(call, 1)) > self.budget:
                    return replace(entry, verdict="skipped", reasons=(over_budget("took", seconds, self.budget),))
            return entry.knowing(differs=difference(implementation, problem, inputs))
        except Exception as error:
            return failed(error)

    def _expected_seconds(self, implementation: Implementation, problem: Problem) -> float:
        """Return seconds by the last length measured; at the first, by the shortened problem if work is quadratic, else 0."""
        if implementation.name in self.last:
            work, seconds = self.last[implementation.name]
            return seconds * _work(implementation, problem) / work
        short = shortened(problem)
        if not implementation.quadratic or implementation.refusals(short):
            return 0.0
        call = partial(implementation.once, Tensors.random(short), short)
        timed = time_interleaved({"": call}, repeats=3, device=problem.device.type)[""]
        return timed.median_s * _work(implementation, problem) / _work(implementation, short)


def compare(
    posed: Posed,
    timer: Timer,
    ceilings: Callable[[], Ceilings] = Ceilings,
    admitted: Callable[[Implementation, Problem, Tensors], ResultRow] | None = None,
    memory_too: bool = False,
) -> CaseFields:
    """Check implementations, each on its problem, and time those that are right in turns, beside the ceilings; then memory."""
    inputs = {problem: Tensors.random(problem) for _, problem in posed.values()}
    entries = {name: (admitted or admit)(one, problem, inputs[problem]) for name, (one, problem) in posed.items()}
    able = {name: posed[name] for name, entry in entries.items() if entry.verdict == "measured"}
    calls = {name: partial(one.once, inputs[problem], problem) for name, (one, problem) in able.items()}
    flops = {name: one.flops(problem) for name, (one, problem) in able.items()}
    fields = side_by_side(entries, calls, flops, ceilings(), timer)
    for name, (one, problem) in able.items() if memory_too else ():
        fields["entries"][name] = fields["entries"][name].knowing(**_memory(one, problem, inputs[problem]))
    return fields


def admit(
    implementation: Implementation,
    problem: Problem,
    inputs: Tensors,
    budget: float = math.inf,
    seconds: Callable[[], float] = lambda: 0.0,
) -> ResultRow:
    """Return the beginning of an entry: its verdict, with the reasons or the check that it rests on.

    `seconds()` is the time that a call may take; more than `budget` seconds are not spent on one.
    """
    if reasons := implementation.refusals(problem):
        return ResultRow(verdict="refused", reasons=tuple(reasons))
    try:
        if (expected_s := seconds()) > budget:
            return ResultRow(verdict="skipped", reasons=(over_budget("would take", expected_s, budget),))
        return checked(check(implementation.checked or implementation, problem, inputs))
    except Exception as error:  # out of memory, a kernel that does not build: the others go on
        return failed(error)


def check(implementation: Implementation, problem: Problem, inputs: Tensors) -> tuple[Check, ...]:
    """Check `out`, and gradients where the problem asks for them, in memory full of NaN.

    The shortened problem is checked as a whole, unless the implementation refuses it, and some rows at the real length.
    """
    short, rows = shortened(problem), _some_rows(inputs, problem)
    whole: tuple[Check, ...] = ()
    if not implementation.refusals(short):
        short_inputs = Tensors.random(short, seed=1)
        with poisoned_memory():
            results = implementation.results(short_inputs, short)
        whole = _expected(implementation, short, short_inputs).checks(results, short.seq)
    in_rows = _rows_of(implementation, inputs, problem, rows)
    return (*whole, *_expected(implementation, problem, inputs, rows).checks(in_rows, problem.seq, " rows"))


def difference(implementation: Implementation, problem: Problem, inputs: Tensors) -> dict[str, Any] | None:
    """Return how far results are from the attention of the problem's pattern, in some rows; None where that is computed."""
    if implementation.computed(problem.pattern) == problem.pattern:
        return None
    rows = _some_rows(inputs, problem)
    differences: dict[str, Any] = dict(computes=implementation.computes)
    truth = exact_rows(problem, inputs, rows)
    for name, computed in _rows_of(implementation, inputs, problem, rows).items():
        what, exact = {"dq": "dquery"}.get(name, name), truth[name]
        error = (computed.double() - exact).abs().max().item()
        differences |= {f"{what}_max_abs": error, f"{what}_relative": error / max(exact.abs().max().item(), 1e-300)}
    return differences


def _some_rows(inputs: Tensors, problem: Problem) -> Tensor:
    """Return the first row and `ROWS` random ones, the same for every implementation."""
    chosen = torch.randperm(problem.seq, generator=torch.Generator().manual_seed(2))[:ROWS]
    return torch.cat([chosen.new_zeros(1), chosen[chosen > 0]]).sort().values.to(inputs.query.device)


def _rows_of(implementation: Implementation, inputs: Tensors, problem: Problem, rows: Tensor) -> Results:
    """Return results that a row has for itself: `out` and the gradient of the query."""
    with poisoned_memory():
        results = implementation.results(inputs, problem)
    return {name: results[name][:, rows] for name in ("out", "dq") if name in results}


def _expected(implementation: Implementation, problem: Problem, inputs: Tensors, rows: Tensor | None = None) -> Expected:
    computed = replace(problem, pattern=implementation.computed(problem.pattern))
    return expected(computed, inputs) if rows is None else expected_rows(computed, inputs, rows)


def side_by_side(
    entries: Entries, calls: Mapping[str, Call], flops: Mapping[str, float], ceilings: Ceilings, timer: Timer
) -> CaseFields:
    """Time together with the ceilings those calls whose entries are right; they get their time and nominal FLOPs."""
    for warm_up in ceilings.calls.values():  # implementations were called when they were checked
        warm_up()
    timed = timer({**ceilings.calls, **{name: call for name, call in calls.items() if entries[name].verdict == "measured"}})
    fast = {name: entries[name].timed(timed[name]).knowing(flops=flops.get(name)) for name in calls if name in timed}
    return dict(ceilings.rates(timed), entries=entries | fast)


def in_turns(entries: Entries, calls: Mapping[str, Call], repeats: int, before: Call | None = None) -> CaseFields:
    """Time long calls beside multiply-adds; `before` is called before each sample, untimed."""
    return side_by_side(entries, calls, {}, Ceilings(), partial(time_interleaved, repeats=repeats, warmup=0, before=before))


def agreeing(
    calls: Mapping[str, Call], seq: int, exact: Tensor | None = None, read: Mapping[str, Callable[[Any], Tensor]] = NOTHING
) -> Entries:
    """Call each once: compare its result with `exact`, by default the first one's, and measure its memory.

    `read`, by name: functions that bring results into one form.
    """
    entries = {}
    for name, call in calls.items():
        result, once = call_once(call)
        result = read[name](result) if name in read else result
        exact = result if exact is None else exact
        entries[name] = checked([agreement(name, result, exact, seq)], once)
    return entries


def agreement(what: str, result: Tensor, exact: Tensor, seq: int, within: float = AGREEMENT) -> Check:
    """Compare two results of `seq` tokens; they may differ by `within` times the largest exact value."""
    error, largest = (x.abs().max().item() for x in (result.double() - exact.double(), exact))
    return Check.of(what, seq, error, 0.0, within * largest)


def checked(checks: Sequence[Check], once: ResultRow = UNTIMED) -> ResultRow:
    """Return the entry of an implementation that was checked: measured, as `once` was, or wrong, with the complaints."""
    complaints = tuple(check.complaint for check in checks if not check.passed)
    if complaints:
        return ResultRow(verdict="wrong", reasons=complaints, checks=tuple(checks))
    return replace(once, checks=tuple(checks))


def failed(error: Exception) -> ResultRow:
    return ResultRow(verdict="failed", reasons=(error_line(error),))


def over_budget(verb: str, seconds: float, budget: float) -> str:
    """Return why a call is not measured, and the option that measures it."""
    return f"one call {verb} about {seconds:.3g} s; the budget is {budget:g} s (--budget {-(-seconds // 1):.0f} measures it)"


def call_once(call: Call) -> tuple[Any, ResultRow]:
    """Return the result of one call, and the entry of it: its seconds, and the bytes held beyond those held before."""
    calls: list[tuple[Any, float]] = []
    held: dict[str, Any] = {}

    def timed() -> None:
        start = perf_counter()
        calls.append((call(), perf_counter() - start))

    try:
        held["peak_bytes"] = memory.peak_memory(timed)
    except memory.MeasureError as error:
        held["memory_note"] = str(error)
        timed()
    result, seconds = calls[0]
    return result, ResultRow(samples=(seconds,), values=held)


def output_bytes(problem: Problem) -> int:
    """Return the size of one tensor shaped like the output: the unit in which memory is easiest to judge."""
    return problem.batch * problem.seq * problem.heads * problem.head_dim * DTYPE_BYTES[problem.dtype]


def results_bytes(problem: Problem) -> int:
    return output_bytes(problem) + 4 * problem.batch * problem.heads * problem.seq


def _work(implementation: Implementation, problem: Problem) -> float:
    """Return nominal FLOPs; where the work is quadratic whatever the pattern, those of dense attention."""
    dense = replace(problem, pattern=Pattern.dense()) if implementation.quadratic else problem
    return max(1.0, implementation.flops(dense))


def _memory(implementation: Implementation, problem: Problem, inputs: Tensors) -> dict[str, Any]:
    try:
        peak = memory.peak_memory(partial(implementation.once, inputs, problem), problem.device.type)
    except memory.MeasureError as error:
        return dict(memory_note=str(error))
    peak += implementation.prepared_bytes(problem)
    return dict(peak_bytes=peak, memory_bytes=peak + sum(x.nbytes for x in inputs.qkv))
