"""Attention with a cache has no gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def check_no_gradient(*tensors: Tensor | None) -> None:
    """Raise ValueError where a gradient of one of these is wanted, or a derivative in forward mode."""
    wanted, tangents = torch.is_grad_enabled(), forward_ad._current_level >= 0
    if not wanted and not tangents:
        return
    for x in tensors:
        if x is not None and wanted and x.requires_grad:
            raise ValueError(
                "a tensor requires a gradient, which attention with a cache does not have; decode under torch.no_grad()"
            )
        if x is not None and tangents and forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
            raise ValueError(
                "a tensor has a tangent (jvp), but attention with a cache has no forward-mode derivative; pass its primal"
            )
