"""What the ranks of the suite's jobs do: functions of the transport, called on every rank; rank 0's result counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dilkit.comm.collectives import gather_values
from dilkit.comm.plan.forecast import Forecast, Speed
from dilkit.comm.plan.traffic import Rows
from dilkit.comm.simulation.simulation import simulate
from dilkit.problem import Problem
from dilkit.testing.accuracy import Check, expected
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.hosts.hidden import hidden_share
from dilkit.tools.bench.hosts.network import sent_bytes
from dilkit.tools.bench.hosts.peers import PEERS
from dilkit.tools.bench.hosts.record import Links
from dilkit.tools.measure.rank_speed import rank_speed
from dilkit.tools.measure.rank_times import time_in_turns
from dilkit.tools.measure.ranks_call import RanksCall
from dilkit.tools.results.record import Entry, Exchange

if TYPE_CHECKING:
    from dilkit.comm import Comm

SETTLED = 0.05
"""Seconds after a call in which the kernel sends what it still holds."""


def compare(
    comm: Comm, problem: Problem, checked: Problem, schedules: Sequence[str], peers: Sequence[str], repeats: int
) -> Links:
    """Every way checked, its bytes counted, and all timed in turns."""
    calls: dict[str, RanksCall] = {name: RanksCall(comm, problem, name) for name in schedules}
    calls |= {name: PEERS[name](comm, problem) for name in peers}
    shard = calls[schedules[0]].shard()
    checks = {name: _checks(replace(call, problem=replace(checked, requires_grad=True))) for name, call in calls.items()}
    for call in calls.values():
        call.once(shard)
    counted = {name: _counted(call, shard) for name, call in calls.items()}
    hidden = {name: hidden_share(call, shard) for name, call in calls.items()}
    speeds = [rank_speed(comm, problem)]
    times = time_in_turns(comm, {name: partial(call.once, shard) for name, call in calls.items()}, repeats)
    entries = {}
    for name, call in calls.items():
        sent, planned, _ = counted[name]
        wrong = [check.complaint for check in checks[name] if not check.passed]
        wrong += [f"bytes sent by rank: {list(sent)}; planned {list(planned)}"] * (sent != planned)
        exchange = Exchange(routes=_routes(call, name), planned_bytes=planned, sent_bytes=sent, work=())
        entries[name] = Entry(
            verdict="wrong" if wrong else "measured",
            reasons=tuple(wrong),
            check=checks[name],
            time=None if wrong else times[name],
            ranks=exchange,
        )
    speeds.append(rank_speed(comm, problem))  # after it too: others may have begun to use the machine meanwhile
    predicted = {name: _mean(calls[name], speeds, _of_model) for name in schedules}
    simulated = {name: _mean(calls[name], speeds, lambda forecast: simulate(forecast).seconds) for name in schedules}
    wire_bytes = {name: wire for name, (_, _, wire) in counted.items()}
    return Links(
        hosts=comm.size,
        entries=entries,
        wire_bytes=wire_bytes,
        predicted_s=predicted,
        simulated_s=simulated,
        hidden=hidden,
        speeds=tuple(speeds),
    )


def _mean(call: RanksCall, speeds: Sequence[Speed], seconds: Callable[[Forecast], float]) -> float:
    """What `seconds` says of a call, the mean of that at each of the measured speeds."""
    rows = Rows(call.problem.head_dim, call.problem.dtype, call.problem.batch)
    return statistics.fmean(seconds(Forecast(call.plan, rows, speed)) for speed in speeds)


def _of_model(forecast: Forecast) -> float:
    """What the planner's model says of the slowest rank."""
    return float(forecast.seconds["overlapped"][forecast.slowest])


def _checks(call: RanksCall) -> tuple[Check, ...]:
    """The results of all ranks, put together, beside the oracle."""
    whole = Tensors.random(call.problem, seed=1)
    found = call.together(whole)
    checks = expected(call.problem, whole).checks(found, call.problem.seq) if call.comm.rank == 0 else ()
    return gather_values(call.comm, checks)[0]


def _counted(call: RanksCall, shard: Tensors) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Bytes of rows that each rank sent in a call; those planned; and those of each host's interface."""
    comm = call.comm
    comm.share(b"", "beginning together")
    time.sleep(SETTLED)
    before, on_wire = comm.sent_bytes, sent_bytes()
    call.once(shard)
    sent = comm.sent_bytes - before
    time.sleep(SETTLED)
    wire = sent_bytes() - on_wire
    return tuple(gather_values(comm, sent)), call.planned_bytes(), tuple(gather_values(comm, wire))


def _routes(call: RanksCall, name: str) -> tuple[str, ...]:
    return () if name in PEERS else tuple(route.kind for route in call.plan.routes)
