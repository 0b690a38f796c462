"""Exchanges that the planner's model counts are those of a run."""

from __future__ import annotations

import pytest
import torch

from dilkit import Pattern
from dilkit.comm import Rows, exchange_plan, ring_dilated_attention, run_threads, shard, shard_cuts
from dilkit.comm.plan.exchange_plan import PHASES
from dilkit.comm.plan.forecast import Forecast, Speed
from dilkit.comm.transports.base import Comm


@pytest.mark.parametrize(("schedule", "keep"), [("auto", "rows"), ("gather", "rows"), ("ring", "rows"), ("gather", "nothing")])
def test_exchanges_that_cost_a_latency_are_those_of_a_run(schedule: str, keep: str) -> None:
    pattern, x = Pattern([8, 32, 64], [1, 2, 4]), torch.randn(1, 64, 4, 8)

    def counted(comm: Comm) -> list[int]:
        rows, numbers = shard(x, comm, pattern).requires_grad_(), [comm._number]
        out = ring_dilated_attention(rows, rows, rows, pattern, comm, schedule=schedule, keep=keep)
        numbers.append(comm._number)
        out.sum().backward()
        return [numbers[1] - numbers[0], comm._number - numbers[1]]

    plan = exchange_plan(pattern, shard_cuts(64, 4, pattern), 4, schedule=schedule, keep=keep)
    forecast = Forecast(plan, Rows(8, "float32"), Speed(1e9, 1e9, latency=1.0))
    assert run_threads(4, counted)[0] == [forecast.exchanges[phase] for phase in PHASES]
    without = Forecast(plan, Rows(8, "float32"), Speed(1e9, 1e9))
    more = forecast.seconds["overlapped"] - without.seconds["overlapped"]
    assert more.round(6).tolist() == [sum(forecast.exchanges.values())] * 4
