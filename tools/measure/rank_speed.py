"""What the ranks of a job can do, measured: the speeds that the planner's model of time goes by."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dilkit.comm.plan.forecast import Speed
from dilkit.problem import Problem
from dilkit.testing.accuracy import differentiated
from dilkit.testing.tensors import Tensors
from dilkit.tools.measure.rank_times import seconds_of

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.comm import Comm

MESSAGE_BYTES, SHORT_BYTES = 4 << 20, 64
"""What each rank sends to each other, to measure their links, and to measure what an exchange takes at the least."""
REPEATS = 5


def rank_speed(comm: Comm, problem: Problem, repeats: int = REPEATS) -> Speed:
    """The speeds of the slowest rank, all working at once; medians.

    The kernel computes `problem`, that of the whole sequence, on as many tokens as a rank has; on links all ranks send to all.
    """
    of_rank = replace(problem, seq=max(problem.seq // comm.size, 1))
    forward, both = (_seconds(comm, _attention(replace(of_rank, requires_grad=grad)), repeats) for grad in (False, True))
    short, long = (_seconds(comm, partial(_exchange, comm, count), repeats) for count in (SHORT_BYTES, MESSAGE_BYTES))
    sent = (comm.size - 1) * (MESSAGE_BYTES - SHORT_BYTES)
    backward = max(both / forward - 1, 1.0)
    return Speed(sent / max(long - short, 1e-9), of_rank.flops() / forward, short, backward)


def _seconds(comm: Comm, call: Callable[[], Any], repeats: int) -> float:
    """The median time of the slowest rank, after a call that does not count."""
    call()
    return statistics.median(seconds_of(comm, call) for _ in range(repeats))


def _attention(problem: Problem) -> Callable[[], Any]:
    """A call of `problem` on this rank alone."""
    from dilkit import dilated_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any:
        is_causal = problem.is_causal
        return dilated_attention(query, key, value, problem.pattern, is_causal=is_causal, key_padding_mask=mask, return_lse=True)

    return partial(differentiated, attend, Tensors.random(problem), problem.requires_grad)


def _exchange(comm: Comm, count: int) -> None:
    """Send `count` bytes to each rank, and wait for as many from each."""
    import torch

    counts = [1] * comm.size
    comm.exchange(torch.ones(comm.size, count, dtype=torch.uint8), counts, counts, "measuring links").wait()
