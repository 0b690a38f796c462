"""Measures a case: checks every implementation, times those that are right in turns, then measures their memory.

`compare` is for implementations of a problem, which are checked against fp64 arithmetic; `agreeing` and `side_by_side` for
any other calls, which are compared with each other. `CaseRunner` compares over several lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, TypedDict

import torch
from torch import Tensor

from dilkit.pattern import Pattern
from dilkit.problem import DTYPE_BYTES, Problem
from dilkit.testing import memory
from dilkit.testing.accuracy import Check, Expected, Results, differentiated, exact_rows, expected, expected_rows, shortened
from dilkit.testing.poison import poisoned_memory
from dilkit.testing.tensors import Tensors
from dilkit.tools.console.text import error_line
from dilkit.tools.measure.ceilings import Ceilings
from dilkit.tools.measure.implementation import Implementation
from dilkit.tools.measure.timing import Call, time_interleaved
from dilkit.tools.results.record import Entries, Entry, Samples, Yardstick
from dilkit.tools.results.rows import NOTHING

AGREEMENT = 1e-4
"""Largest difference that two ways of computing may have in fp32, in units of the largest value."""
Posed = Mapping[str, tuple[Implementation, Problem]]
"""Implementations by name, each with the problem that it computes."""
ROWS = 16
"""Random rows that are checked at the real length, beside the first."""
Timer = Callable[[Mapping[str, Call]], dict[str, Samples]]
"""A function that times calls in turns, all of which were called before."""


class CaseFields(TypedDict):
    """A benchmark case: its yardsticks, and the entries."""

    matmul: Yardstick | None
    copy: Yardstick | None
    fma: Yardstick | None
    entries: Entries


@dataclass
class CaseRunner:
    """Implementations, the method, and how long each took at earlier lengths, by which the next ones are expected to last.

    `budget`: seconds that one call may be expected to take; `dtypes`, `matmul_dtype`: other dtypes than the problem's;
    `forward_memory`: with a backward pass, memory is also that of the forward pass alone.
    """

    implementations: Sequence[Implementation]
    repeats: int = 7
    min_time: float = 0.05
    budget: float = 20.0
    dtypes: Mapping[str, str] = field(default_factory=dict)
    matmul_dtype: str | None = None
    forward_memory: bool = True
    last: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Work (in any unit) and seconds of one call of each implementation at the last length it was measured at."""

    def run(self, problem: Problem) -> CaseFields:
        """Measure at the length of `problem`: an entry for each implementation, whatever became of it."""
        device = problem.device.type
        posed = {i.name: (i, replace(problem, dtype=self.dtypes.get(i.name, problem.dtype))) for i in self.implementations}
        timer = partial(time_interleaved, repeats=self.repeats, warmup=0, min_time=self.min_time, device=device)
        ceilings = partial(Ceilings, self.matmul_dtype or problem.dtype, device)
        fields = compare(posed, timer, ceilings, self._admit, forward_memory=self.forward_memory)
        for name, entry in fields["entries"].items():
            if entry.time:
                self.last[name] = _work(*posed[name]), entry.time.median_s
        return fields

    def _admit(self, implementation: Implementation, problem: Problem, inputs: Tensors) -> Entry:
        """Admit an implementation; one of another function than the pattern's attention is compared with that too."""
        entry = admit(implementation, problem, inputs, self.budget, partial(self._expected_seconds, implementation, problem))
        if entry.verdict != "measured":
            return entry
        try:
            if implementation.name not in self.last:
                start = perf_counter()
                implementation.once(inputs, problem)
                if (seconds := perf_counter() - start) > self.budget:
                    return replace(entry, verdict="skipped", reasons=(over_budget("took", seconds, self.budget),))
            return replace(entry, differs=difference(implementation, problem, inputs))
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
    admitted: Callable[[Implementation, Problem, Tensors], Entry] | None = None,
    call: Callable[[str, Tensors], Call] | None = None,
    forward_memory: bool | None = None,
) -> CaseFields:
    """Check implementations, each on its problem, and time those that are right in turns, beside the ceilings.

    `call(name, inputs)` makes another function to time than one whole call. Memory is measured too, unless `forward_memory` is
    None; with True, that of the forward pass alone as well.
    """
    inputs = {problem: Tensors.random(problem) for _, problem in posed.values()}
    entries = {name: (admitted or admit)(one, problem, inputs[problem]) for name, (one, problem) in posed.items()}
    able = {name: posed[name] for name, entry in entries.items() if entry.verdict == "measured"}
    calls: dict[str, Call] = {name: partial(one.once, inputs[problem], problem) for name, (one, problem) in able.items()}
    if call:
        calls = {name: call(name, inputs[problem]) for name, (_, problem) in able.items()}
    flops = {name: one.flops(problem) for name, (one, problem) in able.items()}
    fields = side_by_side(entries, calls, flops, ceilings(), timer)
    if forward_memory is not None:
        for name, (one, problem) in able.items():
            known = _memory(one, problem, inputs[problem], forward_memory)
            fields["entries"][name] = replace(fields["entries"][name], **known)
    return fields


def admit(
    implementation: Implementation,
    problem: Problem,
    inputs: Tensors,
    budget: float = math.inf,
    seconds: Callable[[], float] = lambda: 0.0,
) -> Entry:
    """Return the beginning of an entry: its verdict, with the reasons or the check that it rests on.

    `seconds()` is the time that a call may take; more than `budget` seconds are not spent on one.
    """
    if reasons := implementation.refusals(problem):
        return Entry(verdict="refused", reasons=tuple(reasons))
    try:
        if (expected_s := seconds()) > budget:
            return Entry(verdict="skipped", reasons=(over_budget("would take", expected_s, budget),))
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
    if not implementation.differs(problem):
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
    """Return the exact results of what it computes, whole or in some rows."""
    plain = implementation.own_gradients
    if plain is not None and problem.requires_grad:
        chosen = torch.arange(problem.seq, device=inputs.query.device) if rows is None else rows

        def compute(dtype: str) -> Results:
            cast = replace(inputs.to(dtype), dout=inputs.dout[:, chosen].to(getattr(torch, dtype)))
            results = differentiated(lambda q, k, v, _: plain(q, k, v, problem, chosen), cast, gradients=True)
            return dict(results, dq=results["dq"][:, chosen])

        return Expected.of(compute, problem, inputs)
    computed = replace(problem, pattern=implementation.computed(problem.pattern))
    return expected(computed, inputs) if rows is None else expected_rows(computed, inputs, rows)


def side_by_side(
    entries: Entries, calls: Mapping[str, Call], flops: Mapping[str, float], ceilings: Ceilings, timer: Timer
) -> CaseFields:
    """Time together with the ceilings those calls whose entries are right; they get their time and nominal FLOPs."""
    for warm_up in ceilings.calls.values():  # implementations were called when they were checked
        warm_up()
    timed = timer({**ceilings.calls, **{name: call for name, call in calls.items() if entries[name].verdict == "measured"}})
    fast = {name: replace(entries[name], time=timed[name], flops=flops.get(name)) for name in calls if name in timed}
    rates = ceilings.rates(timed)
    return CaseFields(matmul=rates.get("matmul"), copy=rates.get("copy"), fma=rates.get("fma"), entries=entries | fast)


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
        one = call_once(call)
        result = read[name](one.result) if name in read else one.result
        exact = result if exact is None else exact
        entries[name] = one.remembered(checked([agreement(name, result, exact, seq)]))
    return entries


def agreement(what: str, result: Tensor, exact: Tensor, seq: int, within: float = AGREEMENT) -> Check:
    """Compare two results of `seq` tokens; they may differ by `within` times the largest exact value."""
    error, largest = (x.abs().max().item() for x in (result.double() - exact.double(), exact))
    return Check.of(what, seq, error, 0.0, within * largest)


def checked(checks: Sequence[Check]) -> Entry:
    """Return the entry of an implementation that was checked: measured, or wrong, with the complaints."""
    complaints = tuple(check.complaint for check in checks if not check.passed)
    return Entry(verdict="wrong" if complaints else "measured", reasons=complaints, check=tuple(checks))


def failed(error: Exception) -> Entry:
    """Return the entry of an implementation that raised."""
    return Entry(verdict="failed", reasons=(error_line(error),))


def over_budget(verb: str, seconds: float, budget: float) -> str:
    """Return why a call is not measured, and the option that measures it."""
    return f"one call {verb} about {seconds:.3g} s; the budget is {budget:g} s (--budget {-(-seconds // 1):.0f} measures it)"


@dataclass(frozen=True)
class SingleCall:
    """One call: its result, its seconds, and the bytes that it held beyond what was held before, None where `why` not."""

    result: Any
    seconds: float
    peak_bytes: int | None
    why: str | None

    def remembered(self, entry: Entry) -> Entry:
        """Return `entry` with the memory of this call, if it is right."""
        return replace(entry, peak_bytes=self.peak_bytes, memory_note=self.why) if entry.verdict == "measured" else entry


def call_once(call: Call) -> SingleCall:
    """Call it, once."""
    calls: list[tuple[Any, float]] = []

    def timed() -> None:
        start = perf_counter()
        calls.append((call(), perf_counter() - start))

    peak, why = None, None
    try:
        peak = memory.peak_memory(timed)
    except memory.MeasureError as error:
        why = str(error)
        timed()
    return SingleCall(*calls[0], peak, why)


def output_bytes(problem: Problem) -> int:
    """Return the size of one tensor shaped like the output: the unit in which memory is easiest to judge."""
    return problem.batch * problem.seq * problem.heads * problem.head_dim * DTYPE_BYTES[problem.dtype]


def results_bytes(problem: Problem) -> int:
    """Return the size of out and lse."""
    return output_bytes(problem) + 4 * problem.batch * problem.heads * problem.seq


def _work(implementation: Implementation, problem: Problem) -> float:
    """Return nominal FLOPs; where the work is quadratic whatever the pattern, those of dense attention."""
    dense = replace(problem, pattern=Pattern.dense()) if implementation.quadratic else problem
    return max(1.0, implementation.flops(dense))


def _memory(implementation: Implementation, problem: Problem, inputs: Tensors, forward: bool) -> dict[str, Any]:
    """Return peak bytes of a call without and with its inputs, and with `forward` of its forward pass alone; or why not."""
    device = problem.device.type
    try:
        peak = memory.peak_memory(partial(implementation.once, inputs, problem), device)
        peak += implementation.prepared_bytes(problem)
        known = dict(peak_bytes=peak, memory_bytes=peak + sum(x.nbytes for x in inputs.qkv))
        if forward and problem.requires_grad:
            known["forward_peak_bytes"] = memory.peak_memory(partial(implementation.attend, inputs, problem), device)
    except memory.MeasureError as error:
        return dict(memory_note=str(error))
    return known
