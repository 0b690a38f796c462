"""What the ranks do in a job of the suite of published settings: time beside one rank alone, and memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dilkit.problem import Problem
from dilkit.tools.bench.published.longest import inputs_of
from dilkit.tools.bench.ranks.call import RingCall
from dilkit.tools.bench.ranks.contest import RingContest
from dilkit.tools.bench.ranks.tasks import problem_of, race
from dilkit.tools.measure import memory
from dilkit.tools.measure.implementation import BACKWARD_FLOPS
from dilkit.tools.measure.ranks import gather, time_in_turns
from dilkit.tools.results.decode import encode

if TYPE_CHECKING:
    from dilkit.comm import Comm

LONG_CALL = 1e11
"""FLOPs of a call of which fewer samples are taken."""


def published(
    comm: Comm, problems: list[dict[str, Any]], one_rank_threads: int, repeats: int, alone: bool
) -> list[dict[str, Any]]:
    """Of each problem the times of the ranks, beside those of one rank alone, and peak bytes of each, its inputs counted.

    `repeats` is for calls that are short: `samples`. `alone`: a rank's process is its own. The bytes are None where they are not
    measured, which `memory_note` explains.
    """
    note = _memory_note(alone)
    found = []
    for fields in problems:
        problem = problem_of(**fields)
        one = _timed(comm, fields, one_rank_threads, samples(flops_of(problem), repeats))
        found.append(one | dict(peak_bytes=None if note else _peaks(comm, problem), memory_note=note))
    return found


def _timed(comm: Comm, fields: dict[str, Any], one_rank_threads: int, repeats: int) -> dict[str, Any]:
    """The ranks beside one of them alone; where there is but one, itself."""
    if comm.size > 1:
        return race(comm, fields, one_rank_threads, repeats)
    call = RingCall(comm, problem_of(**fields))
    inputs = call.shard()
    check = RingContest(comm, ["auto"]).check(call)
    call.once(inputs)
    timed = time_in_turns(comm, {"ranks": partial(call.once, inputs)}, repeats)["ranks"]
    return dict(check=check, entries={"ranks": dict(time=encode(timed))})


def samples(flops: float, repeats: int) -> int:
    """How many of a call of so many FLOPs: fewer where calls are long."""
    return repeats if flops < LONG_CALL else min(3 if flops < 3 * LONG_CALL else 2, repeats)


def flops_of(problem: Problem) -> float:
    """Nominal FLOPs of a call."""
    return problem.flops() * (1 + BACKWARD_FLOPS * problem.requires_grad)


def _memory_note(alone: bool) -> str | None:
    if not alone:
        return "all ranks are in one process"
    try:
        memory.check_peak_memory()
    except memory.MeasureError as error:
        return str(error)
    return None


def _peaks(comm: Comm, problem: Problem) -> list[int]:
    """Of each rank. Calls were made before, so that nothing is loaded or planned in it."""
    call = RingCall(comm, problem)
    rows = replace(problem, seq=len(call.plan.positions(comm.rank)))

    def step() -> Any:
        inputs = inputs_of(rows)
        return inputs, call.once(inputs)

    comm.share(b"", "beginning together")
    peaks: list[int] = gather(comm, memory.peak_memory(step))
    return peaks
