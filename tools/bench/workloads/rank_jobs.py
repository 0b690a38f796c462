"""Jobs that suites start over ranks: functions of the transport, called on every rank; the result of rank 0 counts."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from dilkit.comm import Comm
from dilkit.comm.collectives import gather_values
from dilkit.comm.launch.processes import JobError
from dilkit.problem import Problem
from dilkit.testing.memory import MeasureError, check_peak_memory, peak_memory
from dilkit.testing.tensors import Tensors
from dilkit.threads import torch_threads
from dilkit.tools.bench.suite import SuiteStep
from dilkit.tools.console.text import error_line
from dilkit.tools.measure.implementation import backend_implementations
from dilkit.tools.measure.rank_times import seconds_of, time_in_turns
from dilkit.tools.measure.ranks_call import RanksCall, judged
from dilkit.tools.results.rows import ResultRow, row_of

Case = Mapping[str, Any]
SCHEDULES = ("auto", "scatter", "gather", "ring")
FAILED = "failed jobs"
"""The table of jobs that failed."""


def job_step(table: str, what: str, job: Callable[[], list[ResultRow]], weight: float = 1.0) -> SuiteStep:
    """Return a step whose job may fail: then its row says why, and other measurements go on."""

    def measure() -> list[ResultRow]:
        try:
            return job()
        except Exception as error:
            reason = str(error) if isinstance(error, JobError) else error_line(error)
            return [
                ResultRow(table=FAILED, case=dict(table=table, what=what), who="the job", verdict="failed", reasons=(reason,))
            ]

    return SuiteStep(table, f"{table}: {what}", measure, weight)


def memory(comm: Comm, problem: Problem, keep: str) -> dict[str, int]:
    """Measure the peak bytes of the rank that needs most, over those before its tensors: inputs, results, all between.

    `tensors_bytes`: those of a rank's part of query, key, value, dout, out, lse and the gradients, in fp32.
    """
    warm = RanksCall(comm, replace(problem, seq=min(problem.seq, 1024 * comm.size)), keep=keep)
    warm.once(warm.shard())  # what is loaded and kept at the first call is no part of a call
    call = RanksCall(comm, problem, keep=keep)

    def step() -> Any:
        inputs = call.shard()
        return inputs, call.once(inputs)

    by_query = problem.heads * (4 * problem.head_dim + 1) + problem.kv_heads * 4 * problem.head_dim
    return dict(peak_bytes=max(peaks_of(comm, step)), tensors_bytes=problem.seq * by_query * 4 // comm.size)


def memory_note(alone: bool) -> str | None:
    """Return the reason why the memory of a rank cannot be measured, or None. `alone`: no other rank is in its process."""
    if not alone:
        return "all ranks are in one process"
    try:
        check_peak_memory("cpu")
    except MeasureError as error:
        return str(error)
    return None


def peaks_of(comm: Comm, step: Callable[[], Any]) -> list[int]:
    """Return the peak bytes of a step on each rank, all having begun together."""
    check_peak_memory("cpu")
    comm.share(b"", "beginning together")
    return gather_values(comm, peak_memory(step))


def race(comm: Comm, problem: Problem, one_rank_threads: int, repeats: int, case: Case) -> list[ResultRow]:
    """Time all ranks with a thread each beside rank 0 alone with more, in turns; checked at a shortened length before."""
    entries = beside_one_rank(RanksCall(comm, problem), one_rank_threads, repeats)
    what = {"ranks": f"{comm.size} ranks of one thread", "one rank": f"one rank of {one_rank_threads} threads"}
    return [row_of("race", case, who, entry, what=what[who]) for who, entry in entries.items()]


def beside_one_rank(call: RanksCall, one_rank_threads: int, repeats: int) -> dict[str, ResultRow]:
    """Check a call over ranks, and time it beside the same on rank 0 alone; by itself where there is but one rank."""
    comm, checks, inputs = call.comm, call.check(), call.shard()
    calls: dict[str, Callable[[], Any]] = {"ranks": partial(call.once, inputs)}
    if comm.size > 1:
        whole = Tensors.random(call.problem) if comm.rank == 0 else None

        def alone() -> None:
            if whole is not None:
                with torch_threads(one_rank_threads):
                    backend_implementations(["native"])[0].once(whole, call.problem)

        calls["one rank"] = alone
    for warm in calls.values():
        seconds_of(comm, warm)
    timed = time_in_turns(comm, calls, repeats)
    return {name: judged(checks if name == "ranks" else (), {}, samples) for name, samples in timed.items()}
