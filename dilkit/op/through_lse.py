"""Gradients through `lse`, from one backward pass of any backend: on one device and over ranks."""

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
    key: Tensor,
    factor: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Gradients of query and key through `lse`; `dlse` and `lse` are `(batch, seq, heads)`.

        dS_ij = P_ij dlse_i      where a backward pass has      dS_ij = P_ij (dout_i . v_j - dout_i . out_i)

    With values that are 0, dout_i = (1, 0, ...) and out_i = (-dlse_i, 0, ...) the second is the first. `backward(dout, out)` is
    that pass: gradients of query and key where all values are 0. `factor(size)` is the `power_of_two` by which `dlse` is
    multiplied before it is rounded, for gradients of about that size.
    """
    dlse = dlse.masked_fill(lse == -math.inf, 0.0)
    dout, out = torch.zeros_like(query), torch.zeros_like(query)
    dout[..., 0] = 1

    def gradients(largest: Tensor) -> list[Tensor]:
        power = factor(_largest(dlse) * largest)
        out[..., 0] = -power * dlse
        return [(x / power).to(query.dtype) for x in backward(dout, out)]

    by_key, by_query = _largest(key), _largest(query)
    if query.dtype == torch.float16:  # its range is too small for both at once where queries and keys differ in size
        return gradients(by_key)[0], gradients(by_query)[1]
    dquery, dkey = gradients(torch.maximum(by_key, by_query))
    return dquery, dkey


def _largest(x: Tensor) -> Tensor:
    """The largest magnitude, in fp32 or more; 0 where there is none."""
    return (x.abs().amax() if x.numel() else x.new_zeros(())).to(torch.promote_types(x.dtype, torch.float32))


def power_of_two(largest: Tensor, rows: int) -> Tensor:
    """The factor that takes `largest` to about 1, or to less where a sum of so many rows would not fit into float16.

    1 where that is not finite: what is beside it, as another sequence may be, must not become 0.
    """
    exponent = -torch.log2(largest.float()).ceil() - max(0.0, math.ceil(math.log2(max(rows, 1))) - _ROOM)
    return torch.exp2(exponent.clamp(-120, 120)).where(largest.isfinite(), 1.0).nan_to_num(1.0, 1.0, 1.0)
