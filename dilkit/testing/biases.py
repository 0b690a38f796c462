"""Biases that backends are tried on, by name or by form, with random numbers that are the same at every call."""

from __future__ import annotations

import torch
from torch import Tensor

from dilkit.bias.alibi import Alibi, CoordinateAlibi
from dilkit.bias.base import Bias
from dilkit.bias.form import BiasForm
from dilkit.bias.rows import RowTable
from dilkit.bias.tables import CoordinateTable, GridTable, RelativeTable, t5_buckets
from dilkit.testing.bias_forms import BIAS_FORMS


def made_bias(
    form: BiasForm, heads: int, batch: int, seq: int, draw: torch.Generator, device: str, dtype: torch.dtype = torch.float64
) -> Bias:
    """Make a bias of this form for `batch` sequences of `seq` rows. A tenth of the longest distance adds about 1."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64, device=draw.device).to(device)

    bias: Bias
    side = max(1, round(seq ** (1 / form.dims)))
    shape = (-(-seq // side ** (form.dims - 1)), *(side,) * (form.dims - 1))
    if form.by_query:
        placed = dict(shape=shape, sizes=form.sizes) if form.placed else {}
        bias = RowTable(normal(batch, heads, seq, form.entries), **placed)
    elif form.by_axis:
        bias = CoordinateTable(normal(heads, form.entries), (5 * normal(batch, seq, form.dims)).long(), form.sizes)
    elif form.sizes == BIAS_FORMS["buckets"].sizes and not form.placed:
        bias = RelativeTable(normal(heads, 12), t5_buckets(12, 20).to(device))
    elif form.sizes and not form.placed:
        bias = RelativeTable(normal(heads, *form.sizes))
    elif form.sizes:
        bias = GridTable(normal(heads, *form.sizes), shape)
    elif not form.placed:
        bias = Alibi(normal(heads).abs() * 10 / max(seq, 1))
    else:
        coordinates = 10 * normal(batch, seq, form.dims)
        neutral = normal(batch, seq) > 1 if form.neutral else None
        bias = CoordinateAlibi(normal(heads).abs() / 3, coordinates.float(), form.metric, neutral)
    return bias.with_weights(bias.weights.to(dtype))


def largest_distance(bias: Bias, seq: int) -> float:
    """Return the largest factor of the weights of a bias: 1 for tables."""
    if isinstance(bias, Alibi):
        return float(seq)
    if isinstance(bias, CoordinateAlibi):
        rows = bias.coordinates.flatten(0, -2)
        return float(sum(rows.amax(0) - rows.amin(0))) if len(rows) else 1.0
    return 1.0
