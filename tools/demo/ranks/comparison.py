"""How far two trainings are apart, and what of that is rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isnan

import torch
from torch import Tensor

from dilkit.tools.demo.ranks.record import LargestDifference, RanksTraining

EPSILON = float(torch.finfo(torch.float32).eps)
GROWTH = dict(loss=2.0, norm=20.0, parameter=100.0)
"""Rounding errors, relative and in units of fp32's, that a step may add to the loss, the norm of the gradients, a parameter.

Ranks add up in another order, so that each number of a step is rounded elsewhere, and steps hand that on to each other. A loss is
a mean over thousands of rows, in which errors cancel; a norm has fewer large terms. A parameter is compared as a tensor, norm of
the difference over norm: Adam divides a gradient by its size, so that of one that is nearly zero, as of biases of attention,
what rounding left of it counts in full, from the first step on. Two trainings without ranks, in fp32 and in fp64, are as far
apart. What was seen in 20 steps lies a factor of ten and more below these bounds. Faults lie far above: gradients summed in
place of averaged show in their norms, a row too many or too few in everything.
"""
FEWEST = 20
"""Steps: a training of fewer has the bounds of so many, since the first steps of Adam are as long as later ones."""


def differences(
    alone: RanksTraining, ranks: RanksTraining, parameters: Mapping[str, Tensor], of_ranks: Mapping[str, Tensor]
) -> tuple[LargestDifference, ...]:
    """Of the losses and of the norms of the gradients of all steps, and of the parameters that these have led to."""
    losses = relative([loss for *_, loss in alone.train_curve], [loss for *_, loss in ranks.train_curve])
    norms = relative(alone.norms, ranks.norms)
    tensors = {name: _distance(of_ranks[name], whole) for name, whole in parameters.items()}
    found = {"loss": _of_steps(losses), "norm": _of_steps(norms), "parameter": tensors}
    quantities = dict(loss="loss of a step", norm="norm of the gradients of a step", parameter="parameters at the end")
    return tuple(
        LargestDifference(
            quantity=quantities[name],
            value=max(values.values()),
            where=max(values, key=values.__getitem__),
            bound=bound(name, alone.steps),
        )
        for name, values in found.items()
    )


def bound(name: str, steps: int) -> float:
    """The largest relative difference of the quantity `name` that is taken for rounding after so many steps."""
    return GROWTH[name] * max(steps, FEWEST) * EPSILON


def relative(expected: Sequence[float], found: Sequence[float]) -> list[float]:
    """The relative differences of two courses, as far as both have come."""
    return [_number(abs(y - x) / abs(x) if x else float(y != x)) for x, y in zip(expected, found, strict=False)]


def _of_steps(values: Sequence[float]) -> dict[str, float]:
    return {f"step {number}": value for number, value in enumerate(values, 1)}


def _distance(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of what is expected, in double precision."""
    exact = expected.double()
    return _number(float((found.double() - exact).norm() / exact.norm()))


def _number(difference: float) -> float:
    """A difference that is NaN is the largest that there can be: `max` would pass it over."""
    return inf if isnan(difference) else difference
