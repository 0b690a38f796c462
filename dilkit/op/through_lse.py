"""Gradients through `lse`, from one backward pass of any backend: on one device and over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_ROOM = 14
"""A sum of 2 ** 14 numbers up to 1 is below the largest of float16."""


def through_lse(
    dlse: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    scale: float,
    rows: int,
    of_all: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """Compute gradients of query, key and whatever else `backward` gives, through `lse`; `dlse`, `lse`: `(batch, seq, heads)`.

        dS_ij = P_ij dlse_i      where a backward pass has      dS_ij = P_ij (dout_i . v_j - dout_i . out_i)

    With values that are 0, dout_i = (1, 0, ...) and out_i = (-dlse_i, 0, ...) the second is the first, and `backward(dout, out)`
    is that pass. `rows` of the whole sequence are added up; `of_all` gives, for largest magnitudes `(3,)` here, those of all
    ranks.
    """
    dlse = dlse.masked_fill(lse == -math.inf, 0.0)
    dout = torch.zeros_like(query)
    dout[..., 0] = 1
    largest = [x.abs().amax() if x.numel() else x.new_zeros(()) for x in (dlse, query, key)]
    wide = [x.to(torch.float64 if x.dtype == torch.float64 else torch.float32) for x in largest]
    of_dlse, of_query, of_key = of_all(torch.stack(wide))

    def gradients(of_factor: Tensor) -> list[Tensor]:
        size = abs(scale) * of_factor
        power = power_of_two(of_dlse * size.clamp(min=2.0**-_ROOM), rows)  # which dlse itself has to fit as well
        first = (-power * dlse).to(query.dtype)
        out = F.pad(first[..., None], (0, query.shape[-1] - 1))  # not written in place, which a batch of `dlse` cannot be
        return [(x / power).to(x.dtype) for x in backward(dout, out)]

    if query.dtype == torch.float16:  # its range is too small for both at once where queries and keys differ in size
        dquery, _, *others = gradients(of_key)
        return dquery, gradients(of_query)[1], *others
    return tuple(gradients(torch.maximum(of_key, of_query)))


def power_of_two(largest: Tensor, rows: int) -> Tensor:
    """Return the factor that takes `largest` to about 1, or less where a sum of `rows` would overflow float16; 1 of inf."""
    exponent = -torch.log2(largest.float()).ceil() - max(0.0, math.ceil(math.log2(max(rows, 1))) - _ROOM)
    return torch.exp2(exponent.clamp(-120, 120)).where(largest.isfinite(), 1.0).nan_to_num(1.0, 1.0, 1.0)
