"""Speeds of links and of a kernel, between ranks."""

from __future__ import annotations

from dilkit import Pattern
from dilkit.comm import run_threads
from dilkit.problem import Problem
from dilkit.tools.measure.rank_speed import rank_speed


def test_measured_speeds_are_of_all_ranks() -> None:
    problem = Problem(pattern=Pattern([16, 64], [1, 4]), seq=256, heads=2, head_dim=8)
    first, second = run_threads(2, lambda comm: rank_speed(comm, problem, repeats=1))
    assert first == second
    assert min(first.bandwidth, first.flops, first.latency) > 0
    assert first.backward >= 1
