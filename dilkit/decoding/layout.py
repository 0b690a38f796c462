"""Layout of the rows that caches keep: sizes, dtype and device, and the encoding of a stored row.

int8    | head_dim integers | scale, the four bytes of a float32 |       row = scale * integers, scale = max |row| / 127
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dilkit.op.boundary import lse_dtype

SCALE_BYTES = 4
"""Bytes of the float32 after the head_dim integers of a stored int8 row, by which they are multiplied."""
MOST = 127


@dataclass(frozen=True)
class Layout:
    """Sizes, dtype and device that all tensors of a cache have in common; `stored`: the dtype of the rows that are kept."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    stored: torch.dtype

    @property
    def width(self) -> int:
        return width_of(self.head_dim, self.stored)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def width_of(head_dim: int, dtype: torch.dtype) -> int:
    return head_dim + (SCALE_BYTES if dtype == torch.int8 else 0)


def encoded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Encode `rows` `(..., head_dim)` as they are stored in `dtype`. In int8, a row with a number that is not finite is NaN."""
    if dtype != torch.int8:
        return rows.to(dtype)
    single = rows.float()
    most = single.abs().amax(-1, keepdim=True)
    scale = torch.where(most.isfinite(), most / MOST, math.nan)
    integers = (single / scale).round().clamp(-MOST, MOST).nan_to_num(0.0)
    scale = scale.clone(memory_format=torch.contiguous_format)  # `contiguous` leaves an empty tensor its strides
    return torch.cat((integers.to(torch.int8), scale.view(torch.int8)), -1)


def decoded(stored: Tensor, dtype: torch.dtype) -> Tensor:
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    scale = stored[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)  # a view need not begin where a float32 may
    return (stored[..., :-SCALE_BYTES].to(torch.float32) * scale.view(torch.float32)).to(dtype)


def sink_logits(sink: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logits of a sink as kernels read them from memory: of a view that negates, a copy."""
    return sink.resolve_neg().detach().to(lse_dtype(dtype)).contiguous()


def check_no_gradient(*tensors: Tensor | None) -> None:
    """Raise ValueError if a tensor requires a gradient or has a tangent: attention with a cache has no derivatives."""
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
