"""Biases that backends are tried on, by name or by form, with random numbers that are the same at every call."""

from __future__ import annotations

import torch
from torch import Tensor

from dilkit.bias.alibi import Alibi, CoordinateAlibi
from dilkit.bias.base import Bias
from dilkit.bias.form import BiasForm
from dilkit.bias.tables import GridTable, RelativeTable, t5_buckets
from dilkit.testing.bias_forms import BIAS_FORMS


def made_bias(form: BiasForm, heads: int, batch: int, seq: int, draw: torch.Generator, device: str = "cpu") -> Bias:
    """Make a bias of this form for `batch` sequences of `seq` rows, in float64. A tenth of the longest distance adds about 1."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64, device=draw.device).to(device)

    if form.sizes and not form.placed:
        if form.sizes == BIAS_FORMS["buckets"].sizes:
            return RelativeTable(normal(heads, 12), t5_buckets(12, 20).to(device))
        return RelativeTable(normal(heads, *form.sizes))
    if form.sizes:
        side = max(1, round(seq ** (1 / form.dims)))
        shape = (-(-seq // side ** (form.dims - 1)), *(side,) * (form.dims - 1))
        return GridTable(normal(heads, *form.sizes), shape)
    if not form.placed:
        return Alibi(normal(heads).abs() * 10 / max(seq, 1))
    coordinates = 10 * normal(batch, seq, form.dims)
    return CoordinateAlibi(normal(heads).abs() / 3, coordinates.float(), form.metric)


def largest_distance(bias: Bias, seq: int) -> float:
    """Return the largest factor of the weights of a bias: 1 for tables."""
    if isinstance(bias, Alibi):
        return float(seq)
    if isinstance(bias, CoordinateAlibi):
        rows = bias.coordinates.flatten(0, -2)
        return float(sum(rows.amax(0) - rows.amin(0))) if len(rows) else 1.0
    return 1.0
