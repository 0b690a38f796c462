"""Times over ranks: the slowest rank's, and the speeds that the planner's model goes by."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dilkit.comm import Comm
from dilkit.comm.collectives import gather_values
from dilkit.comm.plan.forecast import Speed
from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors
from dilkit.tools.measure.implementation import automatic
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.results.rows import ResultRow

MESSAGE_BYTES, SHORT_BYTES = 4 << 20, 64
"""Bytes that each rank sends to each other to measure links, and to measure the least time of an exchange."""


def seconds_of(comm: Comm, call: Callable[[], Any]) -> float:
    """Return the seconds that the slowest rank takes for `call`, all having begun together."""
    comm.share(b"", "beginning together")
    start = time.perf_counter()
    call()
    return max(gather_values(comm, time.perf_counter() - start))


def time_in_turns(comm: Comm, calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, ResultRow]:
    """Time in rounds A B A B ..., one call a sample, each the slowest rank's time."""
    return time_interleaved(calls, repeats, warmup=0, clock=lambda call, _: seconds_of(comm, call))


def rank_speed(comm: Comm, problem: Problem, repeats: int = 5) -> Speed:
    """Return the speeds of the slowest rank, all working at once; medians.

    The kernel computes `problem`, that of the whole sequence, on as many tokens as a rank has. On links all ranks send to all.
    """

    def median_seconds(call: Callable[[], Any]) -> float:
        call()
        return statistics.median(seconds_of(comm, call) for _ in range(repeats))

    def exchange(count: int) -> None:
        counts = [1] * comm.size
        comm.exchange(torch.ones(comm.size, count, dtype=torch.uint8), counts, counts, "measuring links").wait()

    of_rank = replace(problem, seq=max(problem.seq // comm.size, 1))
    passes = [replace(of_rank, requires_grad=grad) for grad in (False, True)]
    forward, both = (median_seconds(partial(automatic().once, Tensors.random(one), one)) for one in passes)
    short, long = (median_seconds(partial(exchange, count)) for count in (SHORT_BYTES, MESSAGE_BYTES))
    sent = (comm.size - 1) * (MESSAGE_BYTES - SHORT_BYTES)
    return Speed(sent / max(long - short, 1e-9), of_rank.flops() / forward, short, max(both / forward - 1, 1.0))
