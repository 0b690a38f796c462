"""A bias of a pair, in torch's operators on indices: `dilkit.bias.form` says what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dilkit.bias.form import LoweredBias

Bias = Callable[[Any, Any, Any, Any], Any]


def bias_of(bias: LoweredBias) -> Bias:
    """What is added to the score of query i and key j, numbers in their sequence where positions are not given."""
    form, weights, positions = bias

    def apart(b: Any, i: Any, j: Any) -> list[Any]:
        if positions is None:
            return [i - j]
        at = b if len(positions) > 1 else b * 0
        return [positions[at, i, k] - positions[at, j, k - form.dims] for k in range(form.dims)]

    def distance(b: Any, h: Any, i: Any, j: Any) -> Any:
        parts = apart(b, i, j)
        if form.metric == "euclidean":
            measured = sum(part * part for part in parts) ** 0.5
        elif form.metric == "l1":
            measured = sum(part.abs() for part in parts)
        else:
            measured = parts[0].abs()
            for part in parts[1:]:
                measured = measured.maximum(part.abs())
        return -weights[h, 0] * measured

    def entry(b: Any, h: Any, i: Any, j: Any) -> Any:
        index: Any = 0
        for size, part in zip(form.sizes, apart(b, i, j), strict=True):
            index = index * size + part.clamp(-(size // 2), size // 2) + size // 2
        return weights[h, index if positions is None else index.int()]

    return entry if form.sizes else distance
