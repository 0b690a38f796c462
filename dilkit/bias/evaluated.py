"""A lowered bias of single rows in plain torch, and the gradient of its weights, for backends without a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from dilkit.bias.form import LoweredBias


def evaluate(bias: LoweredBias, queries: Tensor, keys: Tensor) -> Tensor:
    """Compute the bias of rows and keys, int64 numbers of rows: `(batch or 1, heads, len(queries), len(keys))`."""
    form, weights, _ = bias
    if not form.sizes:
        return -weights[:, :, None] * _distances(bias, queries, keys).unsqueeze(1)
    every = _entries(bias, queries, keys)
    if not form.by_query:
        return sum(weights.T[entries].movedim(-1, 1) for entries in every)  # type: ignore[return-value]
    tables = weights[:, :, queries]
    return sum(tables.gather(3, x.expand(*tables.shape[:3], -1)) for x in every).transpose(0, 1)  # type: ignore[union-attr]


def gradient(bias: LoweredBias, dscores: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Compute the gradient of the weights, in their shape, from `dscores` `(batch, heads, len(queries), len(keys))`."""
    form, weights, _ = bias
    if not form.sizes:
        return -(dscores * _distances(bias, queries, keys).unsqueeze(1)).sum((0, 2, 3))[:, None]
    by_head, total = dscores.transpose(0, 1), torch.zeros_like(weights, dtype=dscores.dtype)
    tables = total[:, :, queries] if form.by_query else total
    for entries in _entries(bias, queries, keys):
        if form.by_query:
            tables.scatter_add_(3, entries.expand(by_head.shape), by_head)
        else:
            places = entries.expand(by_head.shape[1:]).reshape(1, -1).expand(len(weights), -1)
            tables.scatter_add_(1, places, by_head.flatten(1))
    if form.by_query:
        total[:, :, queries] = tables
    return total


def _entries(bias: LoweredBias, queries: Tensor, keys: Tensor) -> list[Tensor]:
    """Return the entry of each table that is summed, int64 `(batch or 1, len(queries), len(keys))`."""
    sizes, apart = bias.form.sizes, _differences(bias, queries, keys).long()
    indices = [apart[..., k].clamp(-(size // 2), size // 2) + size // 2 for k, size in enumerate(sizes)]
    if bias.form.by_axis:
        return [index + sum(sizes[:k]) for k, index in enumerate(indices)]
    entries = indices[0]
    for index, size in zip(indices[1:], sizes[1:], strict=True):
        entries = entries * size + index
    return [entries]


def _distances(bias: LoweredBias, queries: Tensor, keys: Tensor) -> Tensor:
    lengths = measured(_differences(bias, queries, keys), bias.form.metric)
    return lengths.nan_to_num(nan=0.0) if bias.form.neutral else lengths


def _differences(bias: LoweredBias, queries: Tensor, keys: Tensor) -> Tensor:
    form, weights, positions = bias
    if positions is None:
        return (queries[:, None] - keys).to(weights.dtype)[None, :, :, None]
    return positions[:, queries, None, : form.dims] - positions[:, None, keys, -form.dims :]


def measured(apart: Tensor, metric: str) -> Tensor:
    """Compute the lengths of differences `(..., dims)` in a metric."""
    if metric == "euclidean":
        return apart.square().sum(-1).sqrt()
    return apart.abs().sum(-1) if metric == "l1" else apart.abs().amax(-1)
