"""Keys that `key_padding_mask` ignores, for kernels that multiply them by 0 instead of passing them over."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def without_ignored(x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Keys or values `(batch, seq, heads, head_dim)` with 0 where the mask ignores them: 0 times what is not finite is NaN."""
    return x if key_padding_mask is None else x.masked_fill(key_padding_mask[:, :, None, None], 0.0)
