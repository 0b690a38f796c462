"""Timing in interleaved rounds."""

from __future__ import annotations

from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.results.record import Samples


def test_rounds_are_interleaved_and_every_sample_is_kept() -> None:
    calls: list[str] = []
    samples = time_interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3, warmup=1)
    assert "".join(calls) == "ab" + "ababab"
    assert [len(s.samples_s) for s in samples.values()] == [3, 3]
    assert samples["a"].calls_per_sample == 1


def test_short_functions_are_called_often_within_a_sample() -> None:
    calls = []
    samples = time_interleaved({"a": lambda: calls.append(1)}, repeats=2, warmup=0, min_time=0.002)["a"]
    assert samples.calls_per_sample > 1
    assert len(calls) >= 2 * samples.calls_per_sample


def test_a_sample_is_the_time_of_one_call() -> None:
    samples = time_interleaved({"a": lambda: None}, repeats=2, min_time=1.0, clock=lambda function, calls: 0.25 * calls)["a"]
    assert samples.calls_per_sample > 1
    assert samples.samples_s == (0.25, 0.25)


def test_median_and_quartiles() -> None:
    samples = Samples.of((5.0, 1.0, 2.0, 4.0, 3.0))
    assert (samples.q1_s, samples.median_s, samples.q3_s) == (2.0, 3.0, 4.0)
    assert samples.samples_s == (5.0, 1.0, 2.0, 4.0, 3.0)
    assert Samples.of((7.0,)).q1_s == 7.0
