"""Timing in interleaved rounds, beside what the machine can do at most."""

from __future__ import annotations

import pytest

from dilkit import Pattern, Problem
from dilkit.comm import run_threads
from dilkit.tools.measure import ceilings
from dilkit.tools.measure.rank_times import rank_speed
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.results.rows import Row


def test_rounds_are_interleaved_and_every_sample_is_kept() -> None:
    calls: list[str] = []
    samples = time_interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3, warmup=1)
    assert "".join(calls) == "ab" + "ababab"
    assert [len(s.samples) for s in samples.values()] == [3, 3]
    assert samples["a"].calls == 1


def test_short_functions_are_called_often_and_a_sample_is_the_time_of_one_call() -> None:
    samples = time_interleaved({"a": lambda: None}, repeats=2, min_time=1.0, clock=lambda function, calls: 0.25 * calls)["a"]
    assert samples.calls > 1
    assert samples.samples == (0.25, 0.25)


def test_median_and_quartiles() -> None:
    row = Row(samples=(5.0, 1.0, 2.0, 4.0, 3.0))
    assert (row.median_s, row.quartiles_s) == (3.0, (2.0, 4.0))


@pytest.mark.usefixtures("tiny_yardsticks")
class TestCeilings:
    def test_ceilings_are_amounts_over_medians(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = ceilings.Ceilings("float32")
        rates = found.rates({name: Row(samples=(0.5, 0.25, 1.0)) for name in found.calls})
        assert rates["matmul"].values == dict(gflops=1e-9 * 2 * 64**3 / 0.5, size=64, dtype="float32")
        assert rates["matmul"].samples == (0.5, 0.25, 1.0)
        monkeypatch.setattr(ceilings, "_MATMUL_BUDGET", 0.0)
        monkeypatch.setitem(ceilings.MATMUL_SIZE, "cpu", 2048)
        assert ceilings.square_matmul("float32", "cpu")[0] == 256, "it would take too long"


def test_speeds_measured_between_ranks_are_of_all_ranks() -> None:
    problem = Problem(pattern=Pattern([16, 64], [1, 4]), seq=256, heads=2, head_dim=8)
    first, second = run_threads(2, lambda comm: rank_speed(comm, problem, repeats=1))
    assert first == second
    assert min(first.bandwidth, first.flops, first.latency) > 0
    assert first.backward >= 1
