"""Attention of T5's decoder to its encoder, of all rows to all tokens: patterns are of one sequence with itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from dilkit.integrations.transformers.cached import KEPT_BY
from dilkit.integrations.transformers.checks import checked_mask
from dilkit.integrations.transformers.token_mask import TokenMask


def attend_across(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: TokenMask | None, dropout: float, scaling: float | None
) -> Tensor:
    """By torch, `(batch, rows, heads, head_dim)`, of queries and keys `(batch, heads, rows, head_dim)`.

    Raises ValueError for keys of a cache that leaves some out.
    """
    if getattr(key, KEPT_BY, None) is not None:
        raise ValueError(
            f"{type(module).__name__} is cross-attention, which a dilated_cache() does not compute; take a DynamicCache"
        )
    checked = checked_mask(mask, module, query, key)
    tokens = None if checked is None or checked.tokens is None else checked.tokens[:, None, None]
    out = F.scaled_dot_product_attention(query, key, value, tokens, dropout_p=dropout, scale=scaling)
    return out.transpose(1, 2)
