"""Simulated idle time of threads, by cases that a hand computes."""

from __future__ import annotations

import pytest

from dilkit.tools.bench.workloads.cpu_calls import QueuedTask, idle_share

EQUAL = [(2.0, ())] * 12
LONG_LAST = [*[(1.0, ())] * 4, (4.0, ())]
ROUNDS = [(1.0, ()), (3.0, ()), (1.0, (0, 1)), (3.0, (0,))]


@pytest.mark.parametrize(
    ("tasks", "threads", "share"),
    [(EQUAL, 4, 0), (EQUAL, 5, 0.2), (LONG_LAST, 2, 1 / 3), (LONG_LAST[::-1], 2, 0), (ROUNDS, 2, 1 / 3), (ROUNDS, 3, 1 / 3)],
)
def test_idle_shares_are_those_of_a_hand(tasks: list[QueuedTask], threads: int, share: float) -> None:
    assert idle_share(tasks, threads) == pytest.approx(share, abs=1e-12)
