"""What the ranks do in a job of the suite of published settings: time beside one rank alone, and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dilkit.tools.bench.published.longest import inputs_of
from dilkit.tools.bench.ranks.call import ProblemFields, RanksCall
from dilkit.tools.bench.ranks.rank import Task
from dilkit.tools.bench.ranks.tasks import peaks_of, race
from dilkit.tools.measure import memory
from dilkit.tools.results.kinds.published import Job, RanksCase, Setting

if TYPE_CHECKING:
    from dilkit.comm import Comm

HEAD_DIM = 64
LONG_CALL = 1e11
"""FLOPs of a call of which fewer samples are taken."""


@dataclass(frozen=True)
class RanksCalls(Task[Job]):
    """Settings and passes: ranks beside one rank that has all cores, in turns, and the peak memory of each rank.

    `divisor` divides lengths. `repeats` is for calls that are short: `samples_of`.
    """

    RESULT = Job

    transport: str
    calls: tuple[tuple[Setting, bool], ...]
    divisor: int
    one_rank_threads: int
    repeats: int

    def run(self, comm: Comm) -> Job:
        note = _memory_note(self.transport)
        rows = tuple(self._row(comm, setting, backward, note) for setting, backward in self.calls)
        return Job(ranks=comm.size, transport=self.transport, rows=rows)

    def _row(self, comm: Comm, setting: Setting, backward: bool, note: str | None) -> RanksCase:
        call = RanksCall(comm, fields_of(setting.divided(self.divisor), backward).problem)
        checks, entries = race(call, self.one_rank_threads, samples_of(call.flops, self.repeats))
        return RanksCase(
            setting=setting,
            backward=backward,
            tokens=setting.divided(self.divisor).tokens,
            transport=self.transport,
            check=checks,
            entries=entries,
            peak_bytes=None if note else _peaks(call),
            memory_note=note,
        )


def fields_of(setting: Setting, backward: bool) -> ProblemFields:
    """The problem of a setting."""
    return ProblemFields(
        lengths=setting.segment_lengths,
        rates=setting.dilation_rates,
        seq=setting.seq,
        heads=setting.heads,
        head_dim=HEAD_DIM,
        batch=setting.batch,
        dtype=setting.dtype,
        requires_grad=backward,
    )


def samples_of(flops: float, repeats: int) -> int:
    """How many samples of a call of so many FLOPs: fewer where calls are long."""
    return repeats if flops < LONG_CALL else min(3 if flops < 3 * LONG_CALL else 2, repeats)


def _memory_note(transport: str) -> str | None:
    """Why the memory of a rank cannot be measured."""
    if transport == "threads":
        return "all ranks are in one process"
    try:
        memory.check_peak_memory()
    except memory.MeasureError as error:
        return str(error)
    return None


def _peaks(call: RanksCall) -> tuple[int, ...]:
    """Peak bytes of each rank, inputs counted. Calls were made before, so that nothing is loaded or planned in it."""
    shard = replace(call.problem, seq=len(call.plan.positions(call.comm.rank)))

    def step() -> Any:
        inputs = inputs_of(shard)
        return inputs, call.once(inputs)

    return peaks_of(call.comm, step)
