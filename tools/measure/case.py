"""One length of a comparison: check every contestant, then time those that are right side by side, then measure their memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

from dilkit.pattern import Pattern
from dilkit.problem import DTYPE_BYTES, Problem
from dilkit.tools.console.text import error_line
from dilkit.tools.measure import correctness
from dilkit.tools.measure import timing as measure
from dilkit.tools.measure.ceilings import Ceilings
from dilkit.tools.measure.implementation import Contestant, Inputs
from dilkit.tools.measure.timing import MatmulRate, MeasureError, Samples

Entry = dict[str, Any]


@dataclass
class Contest:
    """Contestants, the method, and what earlier lengths told of how long the next one will take.

    `budget` is the longest that one call may be expected to take, in seconds; `say` is told what is going on. `dtypes` are those
    of contestants that are given another than the problem's, `matmul_dtype` is that of the yardstick where it is another. With a
    backward pass, memory is also that of the forward pass alone where `forward_memory` says so.
    """

    contestants: Sequence[Contestant]
    repeats: int = 7
    min_time: float = 0.05
    budget: float = 20.0
    say: Callable[[str], Any] = lambda text: None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    matmul_dtype: str | None = None
    forward_memory: bool = True
    last: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Work (in any unit) and seconds of one call of each contestant at the last length it was measured at."""

    def run(self, problem: Problem) -> dict[str, Any]:
        """Everything measured at the length of `problem`, as plain data: an entry for each contestant, whatever became of it.

        An entry's verdict is "measured", "absent" (not installed), "refused", "skipped" (over the budget), "wrong" (a check
        failed) or "failed" (raised). "differs" says what one computes that is not the pattern's attention, and by how much.
        """
        problems = {c.name: replace(problem, dtype=self.dtypes.get(c.name, problem.dtype)) for c in self.contestants}
        inputs = {own: Inputs.random(own) for own in dict.fromkeys(problems.values())}
        given = {name: (inputs[own], own) for name, own in problems.items()}
        known: correctness.Known = {}
        entries = {c.name: self._admit(c, problems[c.name], inputs[problems[c.name]], known) for c in self.contestants}
        known.clear()
        able = [c for c in self.contestants if entries[c.name]["verdict"] == "measured"]
        self.say("time")
        dtype = self.matmul_dtype or problem.dtype
        ceilings = Ceilings(dtype, problem.device.type)
        calls = {**ceilings.calls, **{c.name: partial(c.once, *given[c.name]) for c in able}}
        for warm_up in ceilings.calls.values():  # contestants were called to be admitted
            warm_up()
        timed = measure.time_interleaved(calls, self.repeats, 0, self.min_time, problem.device.type)
        rate = ceilings.matmul(timed)
        found = dict(seq=problem.seq, output_bytes=output_bytes(problem)) | ceilings.told(timed)
        for c in able:
            own = problems[c.name]
            self.say(f"memory of {c.name}")
            entries[c.name] |= speed(c, own, timed[c.name], rate)
            entries[c.name] |= _memory(c, own, inputs[own], self.forward_memory)
            self.last[c.name] = _work(c, own), timed[c.name].median
        return found | dict(entries=entries)

    def _admit(self, contestant: Contestant, problem: Problem, inputs: Inputs, known: correctness.Known) -> Entry:
        """The beginning of the contestant's entry: its verdict, with the reasons or the check that it rests on."""
        if missing := contestant.absent():
            return dict(verdict="absent", reasons=[missing])
        if reasons := contestant.refusals(problem):
            return dict(verdict="refused", reasons=list(reasons))
        self.say(f"check of {contestant.name}")
        try:
            expected = self._expected_seconds(contestant, problem)
            if expected > self.budget:
                return dict(verdict="skipped", reasons=[over_budget("would take", expected, self.budget)])
            findings = correctness.check(contestant.checked or contestant, problem, inputs, known)
            taken = 0.0 if contestant.name in self.last else _seconds(contestant, inputs, problem)
        except Exception as error:
            return dict(verdict="failed", reasons=[error_line(error)])
        checked = [finding.to_dict() for finding in findings]
        if wrong := [f for f in findings if not f.passed]:
            reasons = [f"{f.what} at {f.seq:,} tokens: error {f.error:.2g}, at most {f.allowed:.2g} allowed" for f in wrong]
            return dict(verdict="wrong", reasons=reasons, check=checked)
        if taken > self.budget:
            return dict(verdict="skipped", reasons=[over_budget("took", taken, self.budget)], check=checked)
        return dict(verdict="measured", reasons=[], check=checked, differs=differs(contestant, problem, inputs))

    def _expected_seconds(self, contestant: Contestant, problem: Problem) -> float:
        """From the last length measured; at the first, quadratic work from the shortened problem, and 0 for all others."""
        if contestant.name in self.last:
            work, seconds = self.last[contestant.name]
            return seconds * _work(contestant, problem) / work
        short = correctness.shortened(problem)
        if not contestant.quadratic or contestant.refusals(short):
            return 0.0
        inputs = Inputs.random(short)
        timed = measure.time_interleaved({"": partial(contestant.once, inputs, short)}, repeats=3, device=problem.device.type)
        return timed[""].median * _work(contestant, problem) / _work(contestant, short)


def _seconds(contestant: Contestant, inputs: Inputs, problem: Problem) -> float:
    """Of one call."""
    start = perf_counter()
    contestant.once(inputs, problem)
    return perf_counter() - start


def differs(contestant: Contestant, problem: Problem, inputs: Inputs) -> Entry | None:
    """What a contestant computes in place of the pattern's attention, and how far apart the two are; None when they are one."""
    if not contestant.differs(problem):
        return None
    return dict(computes=contestant.computes, **correctness.difference(contestant, problem, inputs))


def _work(contestant: Contestant, problem: Problem) -> float:
    """Nominal FLOPs; of a contestant whose work is quadratic whatever the pattern, those of dense attention."""
    dense = replace(problem, pattern=Pattern.dense()) if contestant.quadratic else problem
    return max(1.0, contestant.flops(dense))


def over_budget(verb: str, seconds: float, budget: float) -> str:
    return f"one call {verb} about {seconds:.3g} s; the budget is {budget:g} s (--budget {-(-seconds // 1):.0f} measures it)"


def output_bytes(problem: Problem) -> int:
    """Size of one tensor shaped like the output: the unit in which memory is easiest to judge."""
    return problem.batch * problem.seq * problem.heads * problem.head_dim * DTYPE_BYTES[problem.dtype]


def speed(contestant: Contestant, problem: Problem, samples: Samples, rate: MatmulRate) -> Entry:
    """Time and what follows from it; FLOPs are the nominal ones of what the contestant computes."""
    flops = contestant.flops(problem)
    gflops = flops / samples.median / 1e9
    tokens = problem.batch * problem.seq / samples.median
    return dict(time=samples.to_dict(), flops=flops, gflops=gflops, matmul_fraction=gflops / rate.gflops, tokens_per_s=tokens)


def _memory(contestant: Contestant, problem: Problem, inputs: Inputs, forward: bool) -> Entry:
    """Peak extra bytes of a call, and with `forward` of its forward pass alone; None and why where not measurable."""
    functions: dict[str, Callable[[], Any]] = dict(peak_bytes=partial(contestant.once, inputs, problem))
    if forward and problem.requires_grad:
        functions["forward_peak_bytes"] = partial(contestant.attend, inputs, problem)
    try:
        peaks = {name: measure.peak_memory(function, problem.device.type) for name, function in functions.items()}
    except MeasureError as error:
        return dict(peak_bytes=None, forward_peak_bytes=None, kb_per_token=None, memory_note=str(error))
    return dict(**peaks, kb_per_token=peaks["peak_bytes"] / 1000 / (problem.batch * problem.seq))
