"""Gradients through `lse`, from the two passes that every backend has: on one device and over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_ROOM = 14
"""A sum of 2 ** 14 numbers up to 1 is below the largest of float16."""


def through_lse(
    dlse: Tensor,
    lse: Tensor,
    query: Tensor,
    mean_key: Tensor,
    scale: float,
    factor: Callable[[Tensor], Tensor],
    dvalue: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Gradients of query and key through `lse`; `dlse` and `lse` are `(batch, seq, heads)`.

        dq_i = scale * dlse_i * sum_j P_ij k_j      dk_j = scale * sum_i P_ij dlse_i q_i

    The first sum, `mean_key`, is attention with the keys as values; the second is that attention's `dvalue` for
    `dout = scale * dlse * q`, which is taken in the dtype of `query` after multiplication by `factor(dout)`: a `power_of_two`.
    """
    weight = scale * dlse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)
    dout = weight * query
    power = factor(dout)
    dkey = dvalue((power * dout).to(query.dtype).contiguous())
    return (weight * mean_key).to(query.dtype), (dkey / power).to(query.dtype)


def largest(x: Tensor) -> Tensor:
    """The largest magnitude in `x`, 0 where it is empty."""
    return x.abs().amax() if x.numel() else x.new_zeros(())


def power_of_two(largest: Tensor, rows: int) -> Tensor:
    """The factor that takes `largest` to about 1, or to less where a sum of so many rows would not fit into float16.

    1 where that is not finite: what is beside it, as another sequence may be, must not become 0.
    """
    exponent = -torch.log2(largest.float()).ceil() - max(0.0, math.ceil(math.log2(max(rows, 1))) - _ROOM)
    return torch.exp2(exponent.clamp(-120, 120)).where(largest.isfinite(), 1.0).nan_to_num(1.0, 1.0, 1.0)
