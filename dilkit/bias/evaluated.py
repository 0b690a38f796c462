"""A lowered bias of single rows in plain torch, and the gradient of its weights, for backends without a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from dilkit.bias.form import LoweredBias


def evaluate(bias: LoweredBias, queries: Tensor, keys: Tensor) -> Tensor:
    """Compute the bias of rows and keys, int64 numbers of rows: `(batch or 1, heads, len(queries), len(keys))`."""
    form, weights, _ = bias
    of_pairs = _measure(bias, queries, keys)
    if not form.sizes:
        return -weights[:, :, None] * of_pairs.unsqueeze(1)
    return weights.T[of_pairs].movedim(-1, 1)


def gradient(bias: LoweredBias, dscores: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Compute the gradient of the weights, `(heads, entries)`, from `dscores` `(batch, heads, len(queries), len(keys))`."""
    form, weights, _ = bias
    of_pairs = _measure(bias, queries, keys)
    if not form.sizes:
        return -(dscores * of_pairs.unsqueeze(1)).sum((0, 2, 3))[:, None]
    by_head = dscores.transpose(0, 1)
    places = of_pairs.expand(by_head.shape[1:]).reshape(1, -1).expand(len(weights), -1)
    return torch.zeros_like(weights, dtype=dscores.dtype).scatter_add_(1, places, by_head.flatten(1))


def _measure(bias: LoweredBias, queries: Tensor, keys: Tensor) -> Tensor:
    form, weights, positions = bias
    if positions is None:
        apart = (queries[:, None] - keys).to(weights.dtype)[None, :, :, None]
    else:
        apart = positions[:, queries, None, : form.dims] - positions[:, None, keys, -form.dims :]
    if form.sizes:
        entries = torch.zeros(apart.shape[:-1], dtype=torch.int64, device=apart.device)
        for k, size in enumerate(form.sizes):
            entries = entries * size + apart[..., k].long().clamp(-(size // 2), size // 2) + size // 2
        return entries
    return measured(apart, form.metric).nan_to_num(nan=0.0) if form.neutral else measured(apart, form.metric)


def measured(apart: Tensor, metric: str) -> Tensor:
    """Compute the lengths of differences `(..., dims)` in a metric."""
    if metric == "euclidean":
        return apart.square().sum(-1).sqrt()
    return apart.abs().sum(-1) if metric == "l1" else apart.abs().amax(-1)
