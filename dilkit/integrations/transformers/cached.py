"""The last rows of sequences whose keys and values lie in a cache of transformers.

tokens (batch, seen)    . . A A A A    a run: seen where it lies            . A A . A A    else copied: A A A A . .
                        B B B B B B                                         B B B B B B                 B B B B B B
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from dilkit.decoding.kvcache import dilated_attention_with_kvcache
from dilkit.pattern import Pattern

KEPT_BY = "dilkit_layer"
"""The attribute of the keys of new tokens that is the `DilatedLayer` which keeps what there was before."""


def last_rows(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, tokens: Tensor | None, **options: Any) -> Tensor:
    """Attend from the last rows to keys `(batch, seen, kv_heads, head_dim)`: `(batch, rows, heads, head_dim)` like `query`.

    `tokens` bool `(batch, seen)`: which of the keys are tokens; None means all. The rows are the last tokens.
    `options`: further arguments of `dilated_attention_with_kvcache`.
    """

    def call(batch: slice, start: int) -> Tensor:
        part = query[batch], key[batch, start:], value[batch, start:]
        return cast(Tensor, dilated_attention_with_kvcache(*part, pattern, cache_seqlens=lengths[batch], **options))

    batch, rows = query.shape[:2]
    if tokens is None:
        lengths = torch.full((batch,), key.shape[1], dtype=torch.int32, device=query.device)
        return call(slice(None), 0)
    lengths = tokens.sum(1).clamp(min=rows).int()
    starts = _starts(tokens, lengths)
    if starts is None:  # copies, with the tokens of each sequence in front
        order = (~tokens).to(torch.int8).argsort(dim=1, stable=True)
        which = torch.arange(order.shape[0], device=order.device)[:, None], order
        key, value = key[which], value[which]
        return call(slice(None), 0)
    groups = [(start, list(elements)) for start, elements in groupby(range(batch), starts.__getitem__)]
    return torch.cat([call(slice(elements[0], elements[-1] + 1), start) for start, elements in groups])


def _starts(tokens: Tensor, lengths: Tensor) -> list[int] | None:
    """Return the first token of each sequence; None where tokens are no run, or better copied.

    On a GPU a copy costs less than a call for each sequence, and torch.compile cannot know how many calls there would be.
    """
    if torch.compiler.is_compiling() or tokens.device.type != "cpu":
        return None
    first, places = tokens.int().argmax(1), torch.arange(tokens.shape[1])
    run = (places >= first[:, None]) & (places < (first + lengths)[:, None])
    return cast("list[int]", first.tolist()) if torch.equal(run, tokens) else None
