"""The last rows of sequences whose keys and values lie in a cache of transformers."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from dilkit.decoding.kvcache import dilated_attention_with_kvcache
from dilkit.pattern import Pattern


def last_rows(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, tokens: Tensor | None, **call: Any) -> Tensor:
    """What the last rows get, `(batch, rows, heads, head_dim)` like `query`, of keys `(batch, seen, kv_heads, head_dim)`.

    `tokens` bool `(batch, seen)`: which of the keys are tokens; None means all. The rows are the last tokens.
    `call`: further arguments of `dilated_attention_with_kvcache`.
    """
    batch, rows = query.shape[:2]
    if tokens is None:
        lengths = torch.full((batch,), key.shape[1], dtype=torch.int32, device=query.device)
    else:
        lengths = tokens.sum(1).clamp(min=rows).int()
        key, value = _tokens_first(key, value, tokens, lengths)
    return cast(Tensor, dilated_attention_with_kvcache(query, key, value, pattern, cache_seqlens=lengths, **call))


def _tokens_first(key: Tensor, value: Tensor, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with the tokens of each sequence in front, where they are not: behind padding on the left."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    if not torch.compiler.is_compiling() and bool((tokens == (places < lengths[:, None])).all()):
        return key, value
    order = (~tokens).to(torch.int8).argsort(dim=1, stable=True)
    which = torch.arange(len(order), device=order.device)[:, None], order
    return key[which], value[which]
