"""One length of a comparison over ranks: every schedule is checked, its bytes are counted, then all are timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dilkit.problem import Problem
from dilkit.tools.bench.ranks.call import RingCall
from dilkit.tools.measure import ceilings, correctness, memory
from dilkit.tools.measure.case import output_bytes, over_budget
from dilkit.tools.measure.implementation import BACKWARD_FLOPS, Inputs
from dilkit.tools.measure.ranks import gather, seconds_of, time_in_turns
from dilkit.tools.results.decode import encode
from dilkit.tools.results.record import Samples

if TYPE_CHECKING:
    from dilkit.comm import Comm

Entry = dict[str, Any]

_MATMUL = ""
"""Among the names of what is timed: no schedule has an empty name."""


@dataclass(frozen=True)
class RingContest:
    """Schedules on the ranks of `comm`: all ranks make the same calls in the same order, and get the same results.

    `alone` says that no other rank is in this process, so that its memory is this rank's. `say` is told what is going on.
    """

    comm: Comm
    schedules: Sequence[str]
    backend: tuple[str, ...] | None = None
    repeats: int = 7
    budget: float = 20.0
    alone: bool = True
    say: Callable[[str], Any] = lambda text: None

    def run(self, problem: Problem) -> dict[str, Any]:
        """What is measured at the length of `problem`: entries as those of `CaseRunner`, with `ranks`: bytes and work by rank."""
        calls = {name: RingCall(self.comm, problem, name, backend=self.backend) for name in self.schedules}
        inputs = calls[self.schedules[0]].shard()
        entries = {name: self._admit(call, inputs) for name, call in calls.items()}
        able = {name: call for name, call in calls.items() if entries[name]["verdict"] == "measured"}
        self.say("time")
        size, multiply = self._matmul(problem)
        timed = time_in_turns(
            self.comm, {_MATMUL: multiply, **{n: partial(c.once, inputs) for n, c in able.items()}}, self.repeats
        )
        rate = 2e-9 * self.comm.size * size**3 / timed[_MATMUL].median_s
        for name, call in able.items():
            self.say(f"memory of {name}")
            entries[name] |= _speed(problem, timed[name], rate) | self._memory(call, inputs)
        matmul = dict(size=size, dtype=problem.dtype, gflops=rate, **encode(timed[_MATMUL]))
        return dict(seq=problem.seq, output_bytes=output_bytes(problem), matmul=matmul, entries=entries)

    def _matmul(self, problem: Problem) -> tuple[int, Callable[[], Any]]:
        """A matmul that every rank makes at the same time, of the size that suits the slowest."""
        size, _ = ceilings.square_matmul(problem.dtype, problem.device.type)
        return ceilings.square_matmul(problem.dtype, problem.device.type, min(gather(self.comm, size)))

    def _admit(self, call: RingCall, inputs: Inputs) -> Entry:
        """The beginning of an entry: the verdict, and the check and the count of bytes that it rests on."""
        try:
            told = dict(routes=[route.kind for route in call.plan.routes], planned_bytes=call.planned_bytes())
        except ValueError as error:
            return dict(verdict="refused", reasons=[str(error)])
        self.say(f"check of {call.schedule}")
        findings = self.check(call)
        before = self.comm.sent_bytes
        taken = seconds_of(self.comm, partial(call.once, inputs))
        sent = gather(self.comm, self.comm.sent_bytes - before)
        work = [call.plan.work(rank) for rank in range(self.comm.size)]
        entry = dict(check=findings, ranks=dict(**told, sent_bytes=sent, work=work))
        wrong = [f for f in findings if not f["passed"]]
        reasons = ["{what} at {seq:,} tokens: error {error}, {allowed} allowed".format(**f) for f in wrong]
        if sent != told["planned_bytes"]:
            reasons.append(f"bytes sent by rank: {sent}; the plan says {told['planned_bytes']}")
        if reasons:
            return dict(verdict="wrong", reasons=reasons, **entry)
        if taken > self.budget:
            return dict(verdict="skipped", reasons=[over_budget("took", taken, self.budget)], **entry)
        return dict(verdict="measured", reasons=[], **entry)

    def check(self, call: RingCall) -> list[dict[str, Any]]:
        """The results of all ranks, put together, beside the oracle, which rank 0 asks; the problem is a shortened one."""
        from dilkit.comm import unshard

        short = replace(call, problem=correctness.shortened(call.problem))
        if short.problem.seq < self.comm.size:
            return []
        whole = Inputs.random(short.problem, seed=1)
        results = [unshard(x, self.comm) for x in short.once(short.part(whole))]
        judged = correctness.check_tensors(results, short.problem, short.problem.pattern, whole) if self.comm.rank == 0 else ()
        found: list[dict[str, Any]] = gather(self.comm, encode(judged))[0]
        return found

    def _memory(self, call: RingCall, inputs: Inputs) -> dict[str, Any]:
        """Peak extra bytes of a call on the rank that needs most; of its forward pass alone where there is a backward one."""
        parts = dict(peak_bytes=call)
        if call.problem.requires_grad:
            parts["forward_peak_bytes"] = replace(call, problem=replace(call.problem, requires_grad=False))
        if not self.alone:
            note = "memory is not measured: all ranks are in one process"
            return dict(**dict.fromkeys(parts), kb_per_token=None, memory_note=note)
        peaks = {name: max(gather(self.comm, _peak(part, inputs)), key=_as_number) for name, part in parts.items()}
        if failed := [peak for peak in peaks.values() if isinstance(peak, str)]:
            return dict(**dict.fromkeys(parts), kb_per_token=None, memory_note=failed[0])
        rows = call.problem.batch * call.problem.seq / self.comm.size
        return dict(**peaks, kb_per_token=peaks["peak_bytes"] / 1000 / rows)


def _peak(call: RingCall, inputs: Inputs) -> int | str:
    """Bytes, or why they cannot be measured. The call is made in any case: others take part in it."""
    try:
        memory.check_peak_memory(call.problem.device.type)
    except memory.MeasureError as error:
        call.once(inputs)
        return str(error)
    return memory.peak_memory(partial(call.once, inputs), call.problem.device.type)


def _as_number(peak: int | str) -> float:
    return float("inf") if isinstance(peak, str) else peak


def _speed(problem: Problem, samples: Samples, matmul_gflops: float) -> Entry:
    """Time and what follows from it; FLOPs are the nominal ones of the whole problem, speeds those of all ranks together."""
    flops = problem.flops() * (1 + BACKWARD_FLOPS * problem.requires_grad)
    gflops = flops / samples.median_s / 1e9
    tokens = problem.batch * problem.seq / samples.median_s
    told = dict(flops=flops, gflops=gflops, matmul_fraction=gflops / matmul_gflops, tokens_per_s=tokens)
    return dict(time=encode(samples), **told)
