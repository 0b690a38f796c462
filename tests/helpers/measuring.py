"""Measuring in tests: a tiny problem, a wrong implementation, yardsticks that take no time."""

from dataclasses import replace

from dilkit import Pattern, Problem
from dilkit.tools.measure import ceilings, timing
from dilkit.tools.measure.case import CaseRunner
from dilkit.tools.measure.implementation import Implementation, backend_implementations

SMALL = Problem(pattern=Pattern([32, 64], [1, 2]), seq=64, heads=4, head_dim=8, requires_grad=True)


def reference() -> Implementation:
    return backend_implementations(["reference"])[0]


def wrong_by(error: float, name: str = "wrong") -> Implementation:
    def attend(inputs, problem):
        return reference().attend(inputs, problem) + error

    return replace(reference(), name=name, attend=attend)


def interrupt_beyond(seq: int, monkeypatch):
    """Let Ctrl-C come when a longer sequence is to be measured."""
    whole = CaseRunner.run

    def run(self, problem):
        if problem.seq > seq:
            raise KeyboardInterrupt
        return whole(self, problem)

    monkeypatch.setattr(CaseRunner, "run", run)


def shrink(monkeypatch):
    monkeypatch.setitem(ceilings.MATMUL_SIZE, "cpu", 64)
    monkeypatch.setattr(ceilings, "ROUNDS", 1 << 10)
    monkeypatch.setattr(timing, "_calls_lasting", lambda function, min_time, clock: 1)
