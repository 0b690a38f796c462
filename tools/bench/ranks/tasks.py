"""What the ranks of the ring suite's jobs do: functions `(comm, **plain data)`, called on every rank; rank 0's result counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.tools.bench.ranks.call import RingCall
from dilkit.tools.bench.ranks.faults import fault
from dilkit.tools.measure import correctness
from dilkit.tools.measure.implementation import Inputs
from dilkit.tools.measure.memory import check_peak_memory, peak_memory
from dilkit.tools.measure.ranks import gather, seconds_of, time_in_turns
from dilkit.tools.results.decode import encode

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.comm import Comm

__all__ = ["compare", "count_bytes", "fault", "memory", "race", "timeline"]


def problem_of(lengths: list[int], rates: list[int], **fields: Any) -> Problem:
    """A problem out of plain data."""
    return Problem(pattern=Pattern(lengths, rates), **fields)


def count_bytes(comm: Comm, problems: list[dict[str, Any]], schedules: list[str]) -> list[dict[str, Any]]:
    """Bytes that each rank sent in a call, beside what the plan says, for each problem and schedule."""
    found = []
    for fields in problems:
        problem = problem_of(**fields)
        for schedule in schedules:
            call = RingCall(comm, problem, schedule)
            before = comm.sent_bytes
            call.once(call.shard())
            sent = gather(comm, comm.sent_bytes - before)
            found.append(dict(schedule=schedule, sent_bytes=sent, planned_bytes=call.planned_bytes()))
    return found


def compare(comm: Comm, problems: list[dict[str, Any]], schedules: list[str]) -> list[dict[str, Any]]:
    """Results of all ranks put together, beside those of one rank.

    `ratio`: the largest error against fp64, in units of what is allowed. `bitwise`: whether the results with
    `fuse_branches=False` have the same bits as those of one rank with the same option.
    """
    found = []
    for fields in problems:
        problem = problem_of(**fields)
        whole = Inputs.random(problem, seed=1)
        for schedule in schedules:
            results = _together(RingCall(comm, problem, schedule), whole)
            lse, tensors = results[-1], results[:-1]
            judged = correctness.check_tensors(tensors, problem, problem.pattern, whole) if comm.rank == 0 else ()
            ratios = [check.ratio for check in judged]
            ratios.append(_lse_ratio(lse, problem, whole) if comm.rank == 0 else 0.0)
            found.append(dict(schedule=schedule, ratio=max(ratios)))
        found.append(dict(schedule="one by one", bitwise=_bitwise(comm, problem, whole)))
    return found


def _together(call: RingCall, whole: Inputs) -> list[Tensor]:
    """`out, dquery, dkey, dvalue, lse` of all ranks."""
    from dilkit.comm import unshard

    mine = call.part(whole)
    _, lse = call.forward(mine)
    parts = call.once(mine)
    return [*(unshard(x, call.comm) for x in parts), unshard(lse, call.comm, dim=2)]


def _lse_ratio(lse: Tensor, problem: Problem, whole: Inputs) -> float:
    from dilkit.oracle import oracle_attention

    options: dict[str, Any] = dict(is_causal=problem.is_causal, key_padding_mask=whole.key_padding_mask, scale=problem.scale)
    tensors = whole.query.detach(), whole.key.detach(), whole.value.detach()
    truth, plain = (oracle_attention(*tensors, problem.pattern, dtype=d, **options)[1] for d in ("float64", problem.dtype))
    seen = truth.isfinite()
    if not bool((lse.isfinite() == seen).all()):
        return float("inf")
    return correctness.check_tensor("lse", lse[seen], plain[seen], truth[seen], replace(problem, dtype="float32")).ratio


def _bitwise(comm: Comm, problem: Problem, whole: Inputs) -> bool:
    import torch

    from dilkit.comm import run_threads

    many = _together(RingCall(comm, problem, fuse_branches=False), whole)
    (one,) = run_threads(1, lambda alone: _together(RingCall(alone, problem, fuse_branches=False), whole))
    return all(gather(comm, all(torch.equal(a, b) for a, b in zip(many, one, strict=True))))


def memory(comm: Comm, problem: dict[str, Any], schedule: str = "auto") -> dict[str, Any]:
    """Peak bytes of each rank over what it held before its tensors were made: inputs, results, gradients and all between."""
    real = problem_of(**problem)
    small = replace(real, seq=min(real.seq, 1024 * comm.size), requires_grad=real.requires_grad)
    warm = RingCall(comm, small, schedule)
    warm.once(warm.shard())  # what is loaded and kept at the first call is no part of a call
    call = RingCall(comm, real, schedule)

    def step() -> Any:
        inputs = call.shard()
        return inputs, call.once(inputs)

    check_peak_memory()
    comm.share(b"", "beginning together")
    peaks = gather(comm, peak_memory(step))
    return dict(peak_bytes=peaks, tensors_bytes=tensor_bytes(real) // comm.size)


def tensor_bytes(problem: Problem) -> int:
    """What query, key, value, dout, out, lse and the gradients of all ranks take together."""
    from dilkit.problem import DTYPE_BYTES

    p = problem
    by_query = p.batch * p.seq * p.heads * (p.head_dim * DTYPE_BYTES[p.dtype] * (4 if p.requires_grad else 3) + 4)
    return by_query + p.batch * p.seq * p.kv_heads * p.head_dim * DTYPE_BYTES[p.dtype] * (4 if p.requires_grad else 2)


def race(comm: Comm, problem: dict[str, Any], one_rank_threads: int, repeats: int) -> dict[str, Any]:
    """All ranks with a thread each beside rank 0 alone with more, in turns; checked at a shortened length before."""
    from dilkit.tools.bench.ranks.contest import RingContest

    real = problem_of(**problem)
    call = RingCall(comm, real)
    check = RingContest(comm, ["auto"]).check(call)
    inputs, whole = call.shard(), Inputs.random(real) if comm.rank == 0 else None
    calls = {"ranks": partial(call.once, inputs), "one rank": partial(_alone, real, whole, one_rank_threads)}
    for warm in calls.values():
        seconds_of(comm, warm)
    timed = time_in_turns(comm, calls, repeats)
    return dict(check=check, entries={name: dict(time=encode(samples)) for name, samples in timed.items()})


def _alone(problem: Problem, whole: Inputs | None, threads: int) -> None:
    """One rank's call on rank 0; nothing on the others, which have `whole` None."""
    import torch

    from dilkit.tools.measure.implementation import backend_implementations

    if whole is None:
        return
    (native,) = backend_implementations(["native"])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    native.once(whole, problem)
    torch.set_num_threads(before)


def timeline(comm: Comm, problem: dict[str, Any], schedule: str = "auto") -> dict[str, Any]:
    """When each rank posted rows and waited for them in one forward and backward pass, in seconds from the common start."""
    call = RingCall(comm, problem_of(**problem), schedule)
    inputs = call.shard()
    call.once(inputs)
    waits: list[tuple[float, float, str]] = []
    with_clock = _Clocked(comm, waits)
    comm.share(b"", "beginning together")
    start = time.monotonic()
    with with_clock:
        call.once(inputs)
    end = time.monotonic()
    mine = [dict(begin=a - start, end=b - start, step=step) for a, b, step in waits]
    return dict(ranks=gather(comm, dict(seconds=end - start, waits=mine)))


class _Clocked:
    """Within the block, what a rank spends in its transport is noted: posting rows, waiting for them, agreeing."""

    def __init__(self, comm: Comm, waits: list[tuple[float, float, str]]) -> None:
        self.comm, self.waits = comm, waits

    def __enter__(self) -> None:
        begin = self.comm._begin

        def noted(*arguments: Any) -> Any:
            step = str(arguments[-1])
            pending = self._note(step, partial(begin, *arguments))
            if pending.finish is not None:
                pending.finish = partial(self._note, step, pending.finish)
            return pending

        self.comm._begin = noted  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        del self.comm._begin

    def _note(self, step: str, do: Callable[[], Any]) -> Any:
        began = time.monotonic()
        try:
            return do()
        finally:
            self.waits.append((began, time.monotonic(), step))
