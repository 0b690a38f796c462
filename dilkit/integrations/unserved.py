"""Heads of a rank that no branch of a pattern serves."""

from __future__ import annotations

import torch
from torch import Tensor


def nothing_seen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return 0 for every row, like `query` as wide as `value`, with gradients 0 of all three.

    A rank whose parameters had no gradients would differ from the others.
    """
    zeros = [x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0.0) for x in (query, key, value)]
    return zeros[0][..., :1].expand(*query.shape[:-1], value.shape[-1]) + zeros[0].sum() + zeros[1].sum() + zeros[2].sum()
