"""Measuring in tests: a tiny problem, an implementation that computes it wrong, and yardsticks that take no time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from dilkit import Pattern, Problem
from dilkit.testing.tensors import Tensors
from dilkit.tools.measure import ceilings, timing
from dilkit.tools.measure.implementation import Implementation, backend_implementations

SMALL = Problem(pattern=Pattern([32, 64], [1, 2]), seq=64, heads=4, head_dim=8, requires_grad=True)


def reference() -> Implementation:
    """The reference backend."""
    return backend_implementations(["reference"])[0]


def wrong_by(error: float, name: str = "wrong") -> Implementation:
    """The reference, with an error in every result."""

    def attend(inputs: Tensors, problem: Problem) -> Tensor:
        return reference().attend(inputs, problem) + error

    return replace(reference(), name=name, attend=attend)


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the rest of a test, the matmul, the copy and the multiply-adds take no time, and a sample is one call."""
    monkeypatch.setitem(ceilings.MATMUL_SIZE, "cpu", 64)
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(ceilings, "ROUNDS", 1 << 10)
    monkeypatch.setattr(timing, "_calls_lasting", lambda function, min_time, clock: 1)
