"""Rows of keys and values as they are stored: in the dtype of the query, in bfloat16, or as integers with a scale.

int8    | head_dim integers | scale, the four bytes of a float32 |       row = scale * integers, scale = max |row| / 127

An integer is the nearest to row / scale, so that a number is off by at most scale / 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dilkit.decoding.step import SCALE_BYTES

MOST = 127


def name_of(dtype: torch.dtype) -> str:
    """As `dilkit.problem.DTYPES` and `STORED` name it."""
    return str(dtype).removeprefix("torch.")


def width_of(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a row that is stored in `dtype`."""
    return head_dim + (SCALE_BYTES if dtype == torch.int8 else 0)


def encoded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """`rows` `(..., head_dim)` as they are stored in `dtype`. A row with a number that is not finite is stored as NaN in int8."""
    if dtype != torch.int8:
        return rows.to(dtype)
    single = rows.float()
    most = single.abs().amax(-1, keepdim=True)
    scale = torch.where(most.isfinite(), most / MOST, math.nan)
    integers = (single / scale).round().clamp(-MOST, MOST).nan_to_num(0.0)
    return torch.cat((integers.to(torch.int8), scale.contiguous().view(torch.int8)), -1)


def decoded(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Stored rows as numbers of `dtype`, `(..., head_dim)`."""
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    scale = stored[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)  # a view need not begin where a float32 may
    return (stored[..., :-SCALE_BYTES].to(torch.float32) * scale.view(torch.float32)).to(dtype)
