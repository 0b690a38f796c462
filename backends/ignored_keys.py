"""Keys and values that add nothing: 0 times what is not finite is NaN, in kernels that do not pass them over."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def without_ignored(x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Keys or values `(batch, seq, heads, head_dim)` with 0 where the mask ignores them."""
    return x if key_padding_mask is None else x.masked_fill(key_padding_mask[:, :, None, None], 0.0)


def weighted(weights: Tensor, x: Tensor) -> Tensor:
    """`weights @ x`, in which rows of `x` with weight 0 add nothing, be they NaN."""
    product, finite = weights @ x, x.isfinite()
    if finite.all():
        return product
    touched = (weights != 0).to(x.dtype) @ (~finite).to(x.dtype) > 0
    return product.where(touched, weights @ x.masked_fill(~finite, 0.0))
