"""Masks of pairs, with at most `MOST` runs of keys a row: those that a user gives, and blocks of tokens that see each other.

a tensor (batch or 1, heads or 1, rows or 1, keys)    bools, or floats that hide by their lowest number    read by each layer
parts of a model's mask that no pattern has           transformers' own mask, by blocks of rows            read by `tokens_seen`
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from dilkit.attention import dilated_attention
from dilkit.integrations.transformers.weights import rows_of_weights
from dilkit.pattern import Intervals, Pattern
from dilkit.sparse import intervals_of_mask

MOST = 4
"""The most runs of keys that a row sees."""
_PATTERNS = {most: Pattern.of(Intervals(None, most=most)) for most in range(1, MOST + 1)}
CELLS = 2**24
"""The most pairs that are looked at once, but for one row."""
HIDES = -1e8
"""The largest number that hides a key for certain where it is added to a score; float16 needs its lowest."""


def of_tensor(mask: Tensor, kind: str, rows: int, keys: int) -> Tensor:
    """Return the intervals of a mask that a layer gets, int32 `(batch or 1, heads or 1, rows, most, 2)`. Raises ValueError."""
    what = f"attention_mask of {kind} is {mask.dtype} {tuple(mask.shape)}"
    if mask.ndim != 4 or mask.shape[2] not in (1, rows) or mask.shape[3] != keys:
        raise ValueError(
            f"{what}; (batch, {keys}), which of the keys are tokens, or (batch or 1, heads or 1, {rows}, {keys}) is needed"
        )
    if mask.dtype is not torch.bool and (not mask.is_floating_point() or mask.requires_grad):
        raise ValueError(f"{what}{' with a gradient' * mask.requires_grad}; bools or floats without a gradient are needed")
    if torch.compiler.is_compiling():
        raise ValueError(f"{what} under torch.compile, where its intervals are not known; give (batch, seen), the tokens alone")
    step = max(1, CELLS // max(1, mask[:, :, 0].numel()))
    blocks = (_seen(mask[:, :, start : start + step], what) for start in range(0, mask.shape[2], step))
    return _intervals(blocks, what).expand(-1, -1, rows, -1, -1)


def _seen(mask: Tensor, what: str) -> Tensor:
    if mask.dtype is torch.bool:
        return mask
    seen = mask == 0
    if not bool((seen | (mask <= hiding(mask.dtype))).all()):
        raise ValueError(f"{what}, and adds other numbers than 0 and the lowest to scores, a bias; take the attention 'sdpa'")
    return seen


def hiding(dtype: torch.dtype) -> float:
    return max(torch.finfo(dtype).min, HIDES)


def mask_made_for(attention: str, **call: Any) -> Any:
    """Return the mask that transformers makes for its `attention`, by name."""
    return importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS[attention](**call)


def of_function(name: str, q_length: int, q_offset: int | Tensor, **call: Any) -> Tensor:
    """Return the intervals of a mask as transformers makes it for sdpa; `name`: its part that no pattern has."""
    call |= dict(allow_is_causal_skip=False)
    step = max(1, CELLS // max(1, call["batch_size"] * call["kv_length"]))
    blocks = (
        mask_made_for("sdpa", q_length=min(step, q_length - start), q_offset=q_offset + start, **call)
        for start in range(0, q_length, step)
    )
    return _intervals(blocks, f"the mask {name} of the model")


def _intervals(blocks: Iterable[Tensor], what: str) -> Tensor:
    parts = [intervals_of_mask(seen) for seen in blocks]
    most = max(part.shape[3] for part in parts)
    if most > MOST:
        raise ValueError(f"{what}: a row sees {most} runs of keys, of up to {MOST} that are computed; take the attention 'sdpa'")
    return torch.cat([pad(part, (0, 0, 0, most - part.shape[3])) for part in parts], 2)


def attend_by_intervals(
    query: Tensor, key: Tensor, value: Tensor, intervals: Tensor, width: int, dropout: float, weighed: bool, **call: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend from each row to its intervals of keys, to the first `width` of the values; where `weighed`, return the weights too.

    `dilated_attention` takes as many queries as keys here: others are added behind, which see nothing, or are not seen.
    """
    rows, keys = query.shape[1], key.shape[1]
    length, pattern = max(rows, keys), _PATTERNS[intervals.shape[3]]
    query, key, value = (pad(x, (0, 0, 0, 0, 0, length - x.shape[1])) for x in (query, key, value))
    call["intervals"] = pad(intervals, (0, 0, 0, 0, 0, length - rows))
    out = cast(Tensor, dilated_attention(query, key, value, pattern, dropout_p=dropout, **call))
    weights = rows_of_weights(query, key, pattern, None, 0, **call)[:, :, :rows, :keys] if weighed else None
    return out[:, :rows, :, :width], weights
