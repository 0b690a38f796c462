"""Keep ignored keys and values from adding NaN: kernels that compute them all multiply a weight of 0 by inf or NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def without_ignored(x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Set ignored keys or values `(batch, seq, heads, head_dim)` to 0."""
    return x if key_padding_mask is None else x.masked_fill(key_padding_mask[:, :, None, None], 0.0)


def weighted(weights: Tensor, x: Tensor) -> Tensor:
    """Compute `weights @ x`, where rows of `x` with weight 0 add nothing, even NaN."""
    product, finite = weights @ x, x.isfinite()
    if finite.all():
        return product
    touched = (weights != 0).to(x.dtype) @ (~finite).to(x.dtype) > 0
    return product.where(touched, weights @ x.masked_fill(~finite, 0.0))
