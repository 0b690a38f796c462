"""flash-attn's functions to pack the rows of a padded batch and to unpack them, those of its module `bert_padding`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Return the rows `indices` of `input`."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return a tensor of `first_axis_dim` rows, `values` at `indices` and zeros elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the rows of `hidden_states` `(batch, seqlen, ...)` where `attention_mask` or `unused_mask` is not 0.

    Returns the rows `(total, ...)`, their numbers among all, `cu_seqlens`, the length of the longest sequence, and the number of
    rows of each that `attention_mask` has, int32.
    """
    taken = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = taken.sum(-1, dtype=torch.int32)
    indices = taken.flatten().nonzero().flatten()
    cu_seqlens = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, int(lengths.max()), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Unpack rows `(total, ...)` into `(batch, seqlen, ...)`, with zeros between them."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).reshape(batch, seqlen, *hidden_states.shape[1:])
