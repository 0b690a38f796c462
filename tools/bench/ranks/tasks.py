"""What the ranks of the suite's jobs do: functions of the transport, called on every rank; rank 0's result counts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dilkit.comm.collectives import gather_values
from dilkit.problem import DTYPE_BYTES, Problem
from dilkit.testing.accuracy import Check, Results, expected
from dilkit.testing.memory import check_peak_memory, peak_memory
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.ranks import record as records
from dilkit.tools.measure.implementation import backend_implementations
from dilkit.tools.measure.rank_times import seconds_of, time_in_turns
from dilkit.tools.measure.ranks_call import RanksCall
from dilkit.tools.results.record import Entry

if TYPE_CHECKING:
    from dilkit.comm import Comm

BEYOND = 1e300
"""In the place of a ratio of errors that is no number, which JSON has not."""


def count_bytes(comm: Comm, problems: Sequence[Problem], schedules: Sequence[str]) -> records.SentCalls:
    """Bytes that each rank sent in a call, beside what the plan says, for each problem and schedule."""
    calls = [RanksCall(comm, problem, schedule) for problem in problems for schedule in schedules]
    return records.SentCalls(ranks=comm.size, calls=tuple(map(_count, calls)))


def _count(call: RanksCall) -> records.Sent:
    before = call.comm.sent_bytes
    call.once(call.shard())
    sent = tuple(gather_values(call.comm, call.comm.sent_bytes - before))
    return records.Sent(schedule=call.schedule, sent_bytes=sent, planned_bytes=call.planned_bytes())


def compare(comm: Comm, problems: Sequence[Problem], schedules: Sequence[str]) -> records.AgreementCalls:
    """Results of all ranks put together, beside those of one rank, for each problem and schedule."""
    agreements: list[records.Agreement] = []
    for problem in problems:
        whole = Tensors.random(problem, seed=1)
        for schedule in schedules:
            results = RanksCall(comm, problem, schedule).together(whole)
            ratio = _ratio(results, problem, whole) if comm.rank == 0 else None
            agreements.append(records.Agreement(schedule=schedule, ratio=ratio))
        agreements.append(records.Agreement(schedule="one by one", bitwise=_bitwise(comm, problem, whole)))
    return records.AgreementCalls(ranks=comm.size, calls=tuple(agreements))


def _ratio(results: Results, problem: Problem, whole: Tensors) -> float:
    """The largest error of the results of all ranks against fp64, in units of what is allowed."""
    ratios = [check.ratio for check in expected(problem, whole).checks(results, problem.seq)]
    return max(ratio if math.isfinite(ratio) else BEYOND for ratio in ratios)


def _bitwise(comm: Comm, problem: Problem, whole: Tensors) -> bool:
    """Whether the results with `fuse_branches=False` have the same bits as those of one rank with the same option."""
    import torch

    from dilkit.comm import run_threads

    many = RanksCall(comm, problem, fuse_branches=False).together(whole)
    (one,) = run_threads(1, lambda alone: RanksCall(alone, problem, fuse_branches=False).together(whole))
    return all(gather_values(comm, all(torch.equal(x, one[name]) for name, x in many.items())))


def memory(comm: Comm, problem: Problem, keep: str = "rows") -> records.Memory:
    """Peak bytes of each rank over what it held before its tensors were made: inputs, results, gradients and all between."""
    warm = RanksCall(comm, replace(problem, seq=min(problem.seq, 1024 * comm.size)), keep=keep)
    warm.once(warm.shard())  # what is loaded and kept at the first call is no part of a call
    call = RanksCall(comm, problem, keep=keep)

    def step() -> Any:
        inputs = call.shard()
        return inputs, call.once(inputs)

    return records.Memory(ranks=comm.size, peak_bytes=peaks_of(comm, step), tensors_bytes=tensor_bytes(problem) // comm.size)


def peaks_of(comm: Comm, step: Callable[[], Any]) -> tuple[int, ...]:
    """Peak bytes of a step on each rank, all having begun together."""
    check_peak_memory()
    comm.share(b"", "beginning together")
    return tuple(gather_values(comm, peak_memory(step)))


def tensor_bytes(problem: Problem) -> int:
    """What query, key, value, dout, out, lse and the gradients of all ranks take together."""
    p, row = problem, problem.head_dim * DTYPE_BYTES[problem.dtype]
    by_query = p.heads * (row * (4 if p.requires_grad else 3) + 4)
    return p.batch * p.seq * (by_query + p.kv_heads * row * (4 if p.requires_grad else 2))


def race(comm: Comm, problem: Problem, one_rank_threads: int, repeats: int) -> records.Race:
    """All ranks with a thread each beside rank 0 alone with more, in turns; checked at a shortened length before."""
    checks, entries = beside_one_rank(RanksCall(comm, problem), one_rank_threads, repeats)
    return records.Race(ranks=comm.size, one_rank_threads=one_rank_threads, check=checks, entries=entries)


def beside_one_rank(call: RanksCall, one_rank_threads: int, repeats: int) -> tuple[tuple[Check, ...], dict[str, Entry]]:
    """The check of a call over ranks, and its times beside those of rank 0 alone; where there is but one rank, its own."""
    comm, checks, inputs = call.comm, call.check(), call.shard()
    calls: dict[str, Callable[[], Any]] = {"ranks": partial(call.once, inputs)}
    if comm.size > 1:
        whole = Tensors.random(call.problem) if comm.rank == 0 else None
        calls["one rank"] = partial(_alone, call.problem, whole, one_rank_threads)
    for warm in calls.values():
        seconds_of(comm, warm)
    return checks, {name: Entry(time=samples) for name, samples in time_in_turns(comm, calls, repeats).items()}


def _alone(problem: Problem, whole: Tensors | None, threads: int) -> None:
    """One rank's call on rank 0; nothing on the others, which have `whole` None."""
    import torch

    if whole is None:
        return
    (native,) = backend_implementations(["native"])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    native.once(whole, problem)
    torch.set_num_threads(before)


def timeline(comm: Comm, problem: Problem) -> records.Timeline:
    """When each rank posted rows and waited for them in one forward and backward pass, in seconds from the common start."""
    call = RanksCall(comm, problem)
    inputs = call.shard()
    call.once(inputs)
    comm.share(b"", "beginning together")
    start = time.monotonic()
    with _noted(comm) as waits:
        call.once(inputs)
    seconds = time.monotonic() - start
    mine = tuple(replace(wait, begin=wait.begin - start, end=wait.end - start) for wait in waits)
    return records.Timeline(seq=problem.seq, ranks=tuple(gather_values(comm, records.RankTime(seconds, mine))))


@contextmanager
def _noted(comm: Comm) -> Iterator[list[records.Wait]]:
    """Within the block, what a rank spends in its transport is noted: posting rows, waiting for them, agreeing."""
    begin, waits = comm._begin, list[records.Wait]()

    def note(step: str, do: Callable[[], Any]) -> Any:
        began = time.monotonic()
        try:
            return do()
        finally:
            waits.append(records.Wait(began, time.monotonic(), step))

    def noted(*arguments: Any) -> Any:
        step = str(arguments[-1])
        pending = note(step, partial(begin, *arguments))
        if pending.finish is not None:
            pending.finish = partial(note, step, pending.finish)
        return pending

    comm._begin = noted  # type: ignore[method-assign, assignment]
    try:
        yield waits
    finally:
        del comm._begin
