"""Caches have no gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def check_no_gradient(*tensors: Tensor | None) -> None:
    """Raise ValueError where a gradient of one of these is wanted."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError("a tensor requires a gradient, which a cache has none of; decode under torch.no_grad()")
