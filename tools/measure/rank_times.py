"""Times over ranks: the slowest rank's, the speeds that the planner's model goes by, and what sends hide behind computing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dilkit.comm.collectives import gather_values
from dilkit.comm.plan.forecast import Speed
from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors
from dilkit.tools.measure.implementation import automatic
from dilkit.tools.measure.ranks_call import RanksCall
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.results.record import Samples

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.comm import Comm
    from dilkit.comm.transports.base import Pending

MESSAGE_BYTES, SHORT_BYTES = 4 << 20, 64
"""Bytes that each rank sends to each other to measure links, and to measure the least time of an exchange."""


def seconds_of(comm: Comm, call: Callable[[], Any]) -> float:
    """Return the seconds that the slowest rank takes for `call`, all having begun together."""
    comm.share(b"", "beginning together")
    start = time.perf_counter()
    call()
    return max(gather_values(comm, time.perf_counter() - start))


def time_in_turns(comm: Comm, calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Samples]:
    """Time in rounds A B A B ..., one call a sample, each the slowest rank's time."""
    return time_interleaved(calls, repeats, warmup=0, clock=lambda call, _: seconds_of(comm, call))


def rank_speed(comm: Comm, problem: Problem, repeats: int = 5) -> Speed:
    """Return the speeds of the slowest rank, all working at once; medians.

    The kernel computes `problem`, that of the whole sequence, on as many tokens as a rank has. On links all ranks send to all.
    """
    import torch

    def median_seconds(call: Callable[[], Any]) -> float:
        """The median time of the slowest rank, after a call that does not count."""
        call()
        return statistics.median(seconds_of(comm, call) for _ in range(repeats))

    def exchange(count: int) -> None:
        """Send `count` bytes to each rank, and wait for as many from each."""
        counts = [1] * comm.size
        comm.exchange(torch.ones(comm.size, count, dtype=torch.uint8), counts, counts, "measuring links").wait()

    of_rank = replace(problem, seq=max(problem.seq // comm.size, 1))
    passes = [replace(of_rank, requires_grad=grad) for grad in (False, True)]
    forward, both = (median_seconds(partial(automatic().once, Tensors.random(one), one)) for one in passes)
    short, long = (median_seconds(partial(exchange, count)) for count in (SHORT_BYTES, MESSAGE_BYTES))
    sent = (comm.size - 1) * (MESSAGE_BYTES - SHORT_BYTES)
    return Speed(sent / max(long - short, 1e-9), of_rank.flops() / forward, short, max(both / forward - 1, 1.0))


@contextmanager
def noted(comm: Comm, method: str) -> Iterator[list[SimpleNamespace]]:
    """Note the calls of a method of `comm` within the block: "exchange", or "_begin", which agreements go through too.

    Of each: `rows` (their shape and dtype), the other `arguments`, and the times `begun`, `posted`, `asked` (waited for) and
    `arrived`.
    """
    notes, begin = list[SimpleNamespace](), getattr(comm, method)

    def note(rows: Tensor, *arguments: Any) -> Pending:
        one = SimpleNamespace(rows=(tuple(rows.shape), rows.dtype), arguments=arguments, begun=time.monotonic())
        notes.append(one)
        pending: Pending = begin(rows, *arguments)
        one.posted = one.asked = one.arrived = time.monotonic()
        finish = pending.finish

        def finished() -> None:
            one.asked = time.monotonic()
            if finish is not None:
                finish()
            one.arrived = time.monotonic()

        pending.finish = finished
        return pending

    setattr(comm, method, note)
    try:
        yield notes
    finally:
        delattr(comm, method)


def hidden_share(call: RanksCall, shard: Tensors, repeats: int = 5) -> float:
    """Return the share of the time that all exchanges of rows take by themselves which ranks do not spend waiting for a link.

        rank that sends      ... begun -------------- link --------------.
        rank that receives   ........ computes ....... asked --- waits --- arrived
                                                       | exposed: arrived - max(asked, last begun) |

    A wait for a rank that has not begun to send yet is a wait for its work, not for the link. The median of `repeats` calls.
    All ranks are on one machine, so that they read one clock. What is exposed of an exchange is no more than it takes by
    itself: a core that another rank has is no link.
    """
    import torch

    comm, calls = call.comm, list[list[SimpleNamespace]]()

    def again(one: SimpleNamespace) -> None:
        (shape, dtype), (send_counts, recv_counts, *_) = one.rows, one.arguments
        comm.exchange(torch.ones(shape).to(dtype), send_counts, recv_counts, "the same alone").wait()

    for _ in range(repeats):
        comm.share(b"", "beginning together")
        with noted(comm, "exchange") as exchanges:
            call.once(shard)
        calls.append(exchanges)
    alone = [statistics.median(seconds_of(comm, partial(again, one)) for _ in range(3)) for one in calls[0]]
    sources = gather_values(comm, [[rank for rank, rows in enumerate(one.arguments[1]) if rows] for one in calls[0]])
    shares = []
    for exchanges in calls:
        times = gather_values(comm, [(one.begun, one.asked, one.arrived) for one in exchanges])
        shares.append(1 - exposed_seconds(times, sources, alone) / max(comm.size * sum(alone), 1e-9))
    return statistics.median(shares)


def exposed_seconds(
    times: Sequence[Sequence[tuple[float, float, float]]], sources: Sequence[Sequence[Sequence[int]]], alone: Sequence[float]
) -> float:
    """Return seconds that all ranks wait for links: in each exchange from when the last of its `sources` has begun to send.

    `times` and `sources` by rank and exchange; `alone`: what each exchange takes by itself.

        >>> times = [[(0.0, 5.0, 6.0)], [(4.0, 4.0, 7.0)]]  # rank 1 begins late, and waits for what is there since then
        >>> exposed_seconds(times, [[[1]], [[0]]], [2.0])
        3.0
    """
    seconds = 0.0
    for exchanges, senders in zip(times, sources, strict=True):
        for place, ((_, asked, arrived), ranks) in enumerate(zip(exchanges, senders, strict=True)):
            since = max([asked, *(times[rank][place][0] for rank in ranks)])
            seconds += min(max(arrived - since, 0.0), alone[place])
    return seconds
