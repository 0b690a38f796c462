"""How much of what a call sends travels while its ranks compute.

    rank that sends      ... begun -------------- link --------------.
    rank that receives   ........ computes ....... asked --- waits --- arrived
                                                   | exposed: arrived - max(asked, last begun) |

A wait for a rank that has not begun to send yet is a wait for its work, not for the link.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch

from dilkit.comm.collectives import gather_values
from dilkit.comm.transports.base import Pending
from dilkit.testing.tensors import Tensors
from dilkit.tools.measure.rank_times import seconds_of
from dilkit.tools.measure.ranks_call import RanksCall

if TYPE_CHECKING:
    from dilkit.comm import Comm

CALLS = 5
Times: TypeAlias = "list[tuple[float, float, float]]"
"""Of each exchange of a rank: when it began to send, when it asked for what it receives, and when it had that."""


def hidden_share(call: RanksCall, shard: Tensors) -> float:
    """The share of the time that all exchanges of rows take by themselves which ranks do not spend waiting for a link in a call.

    The median of `CALLS` calls. All ranks are on one machine, so that they read one clock. What is exposed of an exchange is no
    more than it takes by itself: a core that another rank has is no link.
    """
    comm = call.comm
    noted = [_noted_call(call, shard) for _ in range(CALLS)]
    alone = [statistics.median(seconds_of(comm, partial(_again, comm, one)) for _ in range(3)) for one in noted[0]]
    sources = gather_values(comm, [[rank for rank, rows in enumerate(one.recv_counts) if rows] for one in noted[0]])
    shares = []
    for exchanges in noted:
        times = gather_values(comm, [(one.begun, one.asked, one.arrived) for one in exchanges])
        shares.append(1 - exposed_seconds(times, sources, alone) / max(comm.size * sum(alone), 1e-9))
    return statistics.median(shares)


def exposed_seconds(times: Sequence[Times], sources: Sequence[Sequence[Sequence[int]]], alone: Sequence[float]) -> float:
    """The seconds that all ranks wait for links: of each exchange from when the last of its `sources` has begun to send.

    `times` and `sources` by rank and exchange; `alone`: what each exchange takes by itself.

        >>> times = [[(0.0, 5.0, 6.0)], [(4.0, 4.0, 7.0)]]  # rank 1 begins late, and waits for what is there since then
        >>> exposed_seconds(times, [[[1]], [[0]]], [2.0])
        3.0
    """
    seconds = 0.0
    for own, theirs in zip(times, sources, strict=True):
        for at, ((_, asked, arrived), ranks) in enumerate(zip(own, theirs, strict=True)):
            since = max([asked, *(times[rank][at][0] for rank in ranks)])
            seconds += min(max(arrived - since, 0.0), alone[at])
    return seconds


@dataclass
class _Exchange:
    """An exchange of rows `(n, width)` of a dtype, and its times."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    send_counts: Sequence[int]
    recv_counts: Sequence[int]
    begun: float
    asked: float = 0.0
    arrived: float = 0.0


def _again(comm: Comm, one: _Exchange) -> None:
    comm.exchange(torch.ones(one.shape).to(one.dtype), one.send_counts, one.recv_counts, "the same alone").wait()


def _noted_call(call: RanksCall, shard: Tensors) -> list[_Exchange]:
    """The exchanges of rows of one call, which all ranks begin together."""
    call.comm.share(b"", "beginning together")
    with _noted(call.comm) as exchanges:
        call.once(shard)
    return exchanges


@contextmanager
def _noted(comm: Comm) -> Iterator[list[_Exchange]]:
    """Within the block every exchange of rows is noted."""
    exchange, noted = comm.exchange, list[_Exchange]()

    def note(rows: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], step: str = "rows") -> Pending:
        one = _Exchange(tuple(rows.shape), rows.dtype, send_counts, recv_counts, time.monotonic())
        noted.append(one)
        pending = exchange(rows, send_counts, recv_counts, step)
        finish = pending.finish

        def finished() -> None:
            one.asked = time.monotonic()
            if finish is not None:
                finish()
            one.arrived = time.monotonic()

        pending.finish = finished
        return pending

    comm.exchange = note  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        del comm.exchange
