"""One length of a benchmark over ranks: every schedule is checked, its bytes are counted, then all are timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dilkit.comm.collectives import gather_values
from dilkit.problem import Problem
from dilkit.testing import memory
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.one_pattern.record import BenchCase
from dilkit.tools.measure import ceilings
from dilkit.tools.measure.case import output_bytes, over_budget, with_speed
from dilkit.tools.measure.rank_times import seconds_of, time_in_turns
from dilkit.tools.measure.ranks_call import RanksCall
from dilkit.tools.results.record import Entry, Exchange, MatmulRate

if TYPE_CHECKING:
    from dilkit.comm import Comm

_MATMUL = ""
"""Among the names of what is timed: no schedule has an empty name."""


@dataclass(frozen=True)
class RanksRunner:
    """Schedules on the ranks of `comm`: all ranks make the same calls in the same order, and get the same results.

    `alone` says that no other rank is in this process, so that its memory is this rank's. `say(text)` is called with what comes
    next.
    """

    comm: Comm
    schedules: Sequence[str]
    backend: tuple[str, ...] | None = None
    repeats: int = 7
    budget: float = 20.0
    alone: bool = True
    say: Callable[[str], Any] = lambda text: None

    def run(self, problem: Problem) -> BenchCase:
        """Everything measured at the length of `problem`: an entry for each schedule, whatever became of it."""
        calls = {name: RanksCall(self.comm, problem, name, backend=self.backend) for name in self.schedules}
        inputs = calls[self.schedules[0]].shard()
        entries = {name: self._admit(call, inputs) for name, call in calls.items()}
        able = {name: call for name, call in calls.items() if entries[name].verdict == "measured"}
        self.say(f"{problem.seq:,} tokens: time")
        size, multiply = self._matmul(problem)
        timed = time_in_turns(
            self.comm, {_MATMUL: multiply, **{n: partial(c.once, inputs) for n, c in able.items()}}, self.repeats
        )
        one = ceilings.matmul_rate(size, problem.dtype, timed[_MATMUL])
        matmul: MatmulRate = replace(one, gflops=self.comm.size * one.gflops)
        for name, call in able.items():
            self.say(f"{problem.seq:,} tokens: memory of {name}")
            entry = with_speed(entries[name], timed[name], call.flops, problem.batch * problem.seq, matmul.gflops)
            entries[name] = self._with_memory(entry, call, inputs)
        return BenchCase(seq=problem.seq, output_bytes=output_bytes(problem), matmul=matmul, entries=entries)

    def _matmul(self, problem: Problem) -> tuple[int, Callable[[], Any]]:
        """A matmul that every rank makes at the same time, of the size that suits the slowest."""
        size, _ = ceilings.square_matmul(problem.dtype, problem.device.type)
        return ceilings.square_matmul(problem.dtype, problem.device.type, min(gather_values(self.comm, size)))

    def _admit(self, call: RanksCall, inputs: Tensors) -> Entry:
        """The beginning of an entry: the verdict, and the check and the count of bytes that it rests on."""
        try:
            plan, planned = call.plan, call.planned_bytes()
        except ValueError as error:
            return Entry(verdict="refused", reasons=(str(error),))
        self.say(f"{call.problem.seq:,} tokens: check of {call.schedule}")
        checks, before = call.check(), self.comm.sent_bytes
        seconds = seconds_of(self.comm, partial(call.once, inputs))
        sent = tuple(gather_values(self.comm, self.comm.sent_bytes - before))
        work = tuple(plan.work(rank) for rank in range(self.comm.size))
        exchange = Exchange(routes=tuple(route.kind for route in plan.routes), planned_bytes=planned, sent_bytes=sent, work=work)
        wrong = [check.complaint for check in checks if not check.passed]
        if sent != planned:
            wrong.append(f"bytes sent by rank: {list(sent)}; the plan says {list(planned)}")
        late = (over_budget("took", seconds, self.budget),) if seconds > self.budget else ()
        verdict = "wrong" if wrong else "skipped" if late else "measured"
        return Entry(verdict=verdict, reasons=tuple(wrong) or late, check=checks, ranks=exchange)

    def _with_memory(self, entry: Entry, call: RanksCall, inputs: Tensors) -> Entry:
        """`entry` with the peak extra bytes of a call on the rank that needs most; or why they are not known."""
        problem, device = call.problem, call.problem.device.type
        if notes := list(filter(None, gather_values(self.comm, memory_note(self.alone, device)))):
            return replace(entry, memory_note=f"memory is not measured: {notes[0]}")
        forward = replace(call, problem=replace(problem, requires_grad=False))
        peak, alone = (
            max(gather_values(self.comm, memory.peak_memory(partial(one.once, inputs), device))) if wanted else None
            for one, wanted in ((call, True), (forward, problem.requires_grad))
        )
        kb_per_token = (peak or 0) / 1000 / (problem.batch * problem.seq / self.comm.size)
        return replace(entry, peak_bytes=peak, forward_peak_bytes=alone, kb_per_token=kb_per_token)


def memory_note(alone: bool, device: str = "cpu") -> str | None:
    """Why the memory of a rank cannot be measured. `alone`: no other rank is in its process."""
    if not alone:
        return "all ranks are in one process"
    try:
        memory.check_peak_memory(device)
    except memory.MeasureError as error:
        return str(error)
    return None
