"""A tiny problem that is measured, and an implementation that computes it wrong."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from dilkit import Pattern, Problem
from dilkit.testing.tensors import Tensors
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
