"""The other schemes on threads: right, and as many bytes as their table says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dilkit.comm import Comm, run_threads
from dilkit.pattern import Pattern, SlidingWindow
from dilkit.problem import Problem
from dilkit.testing.accuracy import Results, expected
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.hosts.peers import PEERS

SMALL = Problem(pattern=Pattern([8, 32, 64], [1, 2, 4]), seq=64, heads=4, head_dim=8, requires_grad=True)


@pytest.mark.parametrize("name", PEERS)
def test_is_right_and_sends_as_many_bytes_as_its_table_says(name: str) -> None:
    whole = Tensors.random(SMALL, seed=1)

    def on_rank(comm: Comm) -> tuple[Results, int]:
        call = PEERS[name](comm, SMALL)
        call.once(call.part(whole))
        sent = comm.sent_bytes
        assert call.planned_bytes() == (sent,) * comm.size
        return call.together(whole), sent

    found, sent = run_threads(4, on_rank)[0]
    assert {*found} == {"out", "dq", "dk", "dv"}
    assert [check.complaint for check in expected(SMALL, whole).checks(found, 64) if not check.passed] == []
    shard = 2 * 16 * 4 * 8 * 4
    assert sent == {"full ring": 10, "all-gather": 6, "ulysses": 3}[name] * shard


@pytest.mark.parametrize(
    "problem",
    [
        replace(SMALL, is_causal=True),
        replace(SMALL, pattern=Pattern([24, 64], [1, 4])),
        replace(SMALL, pattern=Pattern.of(SlidingWindow(4))),
        replace(SMALL, seq=66),
    ],
)
def test_a_problem_that_does_not_fit_whole_shards_is_refused(problem: Problem) -> None:
    with pytest.raises(ValueError, match="whole shards are sent"):
        run_threads(4, lambda comm: PEERS["all-gather"](comm, problem).once(Tensors.random(problem)))
