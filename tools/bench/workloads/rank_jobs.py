"""Jobs that suites start over ranks: functions of the transport, called on every rank; the result of rank 0 counts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dilkit.comm.collectives import gather_values
from dilkit.comm.launch.processes import JobError
from dilkit.problem import Problem
from dilkit.testing.accuracy import Check
from dilkit.testing.memory import check_peak_memory, peak_memory
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.suite import Step
from dilkit.tools.measure.implementation import backend_implementations
from dilkit.tools.measure.rank_times import noted, seconds_of, time_in_turns
from dilkit.tools.measure.ranks_call import RanksCall
from dilkit.tools.results.record import Entry
from dilkit.tools.results.rows import NOTHING, Row, row_of

if TYPE_CHECKING:
    from dilkit.comm import Comm

Case = Mapping[str, Any]
SCHEDULES = ("auto", "scatter", "gather", "ring")
FAILED, JOB = "failed jobs", "the job"
"""The table of jobs that failed, and who did."""
LARGEST = 1e300
"""Ratio of errors that stands for one that is no number, which JSON has not."""


def job_step(table: str, what: str, job: Callable[[], list[Row]]) -> Step:
    """A step whose job may fail: then its row says why, and other measurements go on."""

    def measure() -> list[Row]:
        try:
            return job()
        except JobError as error:
            case = dict(table=table, what=what)
            return [Row(table=FAILED, case=case, who=JOB, verdict="failed", reasons=(str(error),))]

    return Step(table, f"{table}: {what}", measure)


def check_calls(
    comm: Comm, problems: Mapping[str, Problem], schedules: Sequence[str], compared_in: str, case: Case = NOTHING
) -> list[Row]:
    """Count the bytes of each problem and schedule beside those of the plan, and compare results with the definition.

    `compared_in`: the dtype of the problems whose results are compared. The last row of a problem compares bits with one rank.
    """
    rows = []
    for name, problem in problems.items():
        case, compared = {**case, "problem": name}, replace(problem, dtype=compared_in)
        for schedule in schedules:
            ratios = [check.ratio for check in RanksCall(comm, compared, schedule).check_whole()]
            values = dict(ratio=max(ratio if math.isfinite(ratio) else LARGEST for ratio in ratios))
            rows.append(Row(table="calls", case=case, who=schedule, values=_sent(RanksCall(comm, problem, schedule)) | values))
        rows.append(Row(table="calls", case=case, who="one by one", values=dict(bitwise=_bitwise(comm, compared))))
    return rows


def count_bytes(comm: Comm, problem: Problem, case: Case) -> list[Row]:
    """Count the bytes of one call beside those of the plan."""
    return [Row(table="million", case=dict(case), who="auto", values=_sent(RanksCall(comm, problem)))]


def _sent(call: RanksCall) -> dict[str, Any]:
    """Bytes that each rank sent in a call, and those of the plan."""
    before = call.comm.sent_bytes
    call.once(call.shard())
    return dict(sent_bytes=gather_values(call.comm, call.comm.sent_bytes - before), planned_bytes=[*call.planned_bytes()])


def _bitwise(comm: Comm, problem: Problem) -> bool:
    """True if results with `fuse_branches=False` have the same bits as those of one rank with the same option."""
    import torch

    from dilkit.comm import run_threads

    whole = Tensors.random(problem, seed=1)
    many = RanksCall(comm, problem, fuse_branches=False).together(whole)
    (one,) = run_threads(1, lambda alone: RanksCall(alone, problem, fuse_branches=False).together(whole))
    return all(gather_values(comm, all(torch.equal(x, one[name]) for name, x in many.items())))


def memory(comm: Comm, problem: Problem, keep: str, row: Row) -> list[Row]:
    """Measure the peak bytes of the rank that needs most, over those before its tensors: inputs, results, all between.

    `row`, whose values these complete, is of an fp32 problem with a backward pass. `tensors_bytes`: those of a rank's part of
    query, key, value, dout, out, lse and the gradients.
    """
    warm = RanksCall(comm, replace(problem, seq=min(problem.seq, 1024 * comm.size)), keep=keep)
    warm.once(warm.shard())  # what is loaded and kept at the first call is no part of a call
    call = RanksCall(comm, problem, keep=keep)

    def step() -> Any:
        inputs = call.shard()
        return inputs, call.once(inputs)

    by_query = problem.heads * (4 * problem.head_dim + 1) + problem.kv_heads * 4 * problem.head_dim
    tensors_bytes = problem.seq * by_query * 4 // comm.size
    return [replace(row, values=row.values | dict(peak_bytes=max(peaks_of(comm, step)), tensors_bytes=tensors_bytes))]


def peaks_of(comm: Comm, step: Callable[[], Any]) -> tuple[int, ...]:
    """Peak bytes of a step on each rank, all having begun together."""
    check_peak_memory()
    comm.share(b"", "beginning together")
    return tuple(gather_values(comm, peak_memory(step)))


def race(comm: Comm, problem: Problem, one_rank_threads: int, repeats: int, case: Case) -> list[Row]:
    """Time all ranks with a thread each beside rank 0 alone with more, in turns; checked at a shortened length before."""
    checks, entries = beside_one_rank(RanksCall(comm, problem), one_rank_threads, repeats)
    wrong = tuple(check.complaint for check in checks if not check.passed)
    became: dict[str, Any] = dict(verdict="wrong", reasons=wrong, time=None) if wrong else {}
    entries["ranks"] = replace(entries["ranks"], check=checks, **became)
    what = {"ranks": f"{comm.size} ranks of one thread", "one rank": f"one rank of {one_rank_threads} threads"}
    return [row_of("race", case, who, entry, what=what[who]) for who, entry in entries.items()]


def beside_one_rank(call: RanksCall, one_rank_threads: int, repeats: int) -> tuple[tuple[Check, ...], dict[str, Entry]]:
    """Check a call over ranks, and time it beside the same on rank 0 alone; by itself where there is but one rank."""
    comm, checks, inputs = call.comm, call.check(), call.shard()
    calls: dict[str, Callable[[], Any]] = {"ranks": partial(call.once, inputs)}
    if comm.size > 1:
        whole = Tensors.random(call.problem) if comm.rank == 0 else None
        calls["one rank"] = partial(_alone, call.problem, whole, one_rank_threads)
    for warm in calls.values():
        seconds_of(comm, warm)
    return checks, {name: Entry(time=samples) for name, samples in time_in_turns(comm, calls, repeats).items()}


def _alone(problem: Problem, whole: Tensors | None, threads: int) -> None:
    """Make one rank's call on rank 0; nothing on the others, which have `whole` None."""
    import torch

    if whole is None:
        return
    (native,) = backend_implementations(["native"])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    native.once(whole, problem)
    torch.set_num_threads(before)


def timeline(comm: Comm, problem: Problem, case: Case) -> list[Row]:
    """Note when each rank posted rows and waited for them in a forward and backward pass, in seconds from the common start."""
    call = RanksCall(comm, problem)
    inputs = call.shard()
    call.once(inputs)
    comm.share(b"", "beginning together")
    start = time.monotonic()
    with noted(comm, "_begin") as notes:
        call.once(inputs)
    seconds = time.monotonic() - start
    waits = [[begin - start, end - start] for n in notes for begin, end in ((n.begun, n.posted), (n.asked, n.arrived))]
    ranks = gather_values(comm, dict(seconds=seconds, waits=waits))
    return [Row(table="timeline", case=dict(case), who=f"rank {rank}", values=values) for rank, values in enumerate(ranks)]
