"""`output_attentions=True`: the matrix of weights of a layer, beside its result, which is computed without it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dilkit.pattern import Pattern
from dilkit.weights import attention_rows

BLOCK = 2**22
"""The most scores that are computed at once, but for one row."""


def weights_of(query: Tensor, key: Tensor, pattern: Pattern, tokens: Tensor | None, in_places: bool, **call: Any) -> Tensor:
    """Return the weights `(batch, heads, rows, keys)` of the last rows, 0 of padded keys and of rows not computed.

    `tokens`, `in_places`: as in `attend`. `call`: arguments of `dilkit.attention_rows`.
    """
    rows, keys = query.shape[1], key.shape[1]  # the latter with those that a cache has room for
    if tokens is None:
        return rows_of_weights(query, key, pattern, None, keys - rows, **call)
    weights = []
    for i, places in enumerate(tokens):
        seen = places.nonzero()[:, 0]
        if len(seen) == 0:
            weights.append(query.new_zeros(query.shape[2], rows, keys))
            continue
        first = int(seen[-1]) if rows == 1 else len(places) - rows  # the place of the first row
        if in_places:
            seen = torch.arange(int(seen[0]), int(seen[-1]) + 1, device=seen.device)
        own_rows = seen[seen >= first] - first
        part = rows_of_weights(
            query[i : i + 1, own_rows], key[i : i + 1, seen], pattern, ~places[None, seen], len(seen) - len(own_rows), **call
        )
        by_row = part.new_zeros(query.shape[2], rows, len(seen)).index_copy(1, own_rows, part[0])
        weights.append(by_row.new_zeros(query.shape[2], rows, keys).index_copy(2, seen, by_row))
    return torch.stack(weights)


def rows_of_weights(query: Tensor, key: Tensor, pattern: Pattern, padding: Tensor | None, offset: int, **call: Any) -> Tensor:
    """Return weights `(batch, heads, rows, keys)` block by block, without keys of bool `padding` `(batch, keys)`.

    The first row has the place `offset` among the keys. `attention_rows` takes as many rows as keys: others are added, unseen.
    """
    (batch, rows, heads), keys = query.shape[:3], key.shape[1]
    length = max(offset + rows, keys)
    if length > keys:
        padding = torch.zeros(batch, keys, dtype=torch.bool, device=key.device) if padding is None else padding
        padding, key = pad(padding, (0, length - keys), value=True), pad(key, (0, 0, 0, 0, 0, length - keys))
    query = pad(query, (0, 0, 0, 0, offset, length - offset - rows))
    step = max(1, BLOCK // max(1, batch * heads * length))
    blocks = [range(start, min(start + step, offset + rows)) for start in range(offset, offset + rows, step)]
    parts = [attention_rows(query, key, pattern, block, key_padding_mask=padding, **call) for block in blocks]
    return torch.cat(parts, 2)[..., :keys].to(query.dtype)
