"""Nested tensors of `torch.nested`, layout `torch.jagged`: packed sequences, with where each of them begins.

jagged   (batch, j, heads, head_dim)       values()   (total, heads, head_dim)       all sequences one after the other
                                           offsets()  (batch + 1,)                   cu_seqlens
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dilkit.packed.attention import dilated_attention_varlen
from dilkit.pattern import Pattern

_MAKE = "torch.nested.nested_tensor([...], layout=torch.jagged)"


def is_nested(x: object) -> bool:
    """True if `x` is a nested tensor, of whatever layout."""
    return isinstance(x, Tensor) and x.is_nested


def attend_nested(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    key_padding_mask: Tensor | None,
    return_lse: bool,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `dilated_attention` of jagged tensors as one packed call: jagged `out`, and `lse` `(batch, heads, j)`."""
    if key_padding_mask is not None:
        raise ValueError("key_padding_mask is given with nested tensors; leave the ignored keys out of the sequences")
    (query_rows, key_rows, value_rows), cu_seqlens = packed_rows(4, query=query, key=key, value=value)
    returned = dilated_attention_varlen(query_rows, key_rows, value_rows, pattern, cu_seqlens, return_lse=return_lse, **options)
    if not return_lse:
        return nested_like(query, returned)  # type: ignore[arg-type]
    out, lse = returned
    return nested_like(query, out), nested_like(query, lse.transpose(0, 1)).transpose(1, 2)


def packed_rows(dimensions: int, **tensors: Any) -> tuple[list[Tensor], Tensor]:
    """Return the rows of all sequences of each tensor, `(total, ...)`, and the `cu_seqlens` that they share.

    Raises TypeError or ValueError, naming the tensor, unless all are jagged, of so many dimensions and of the same sequences.
    """
    first, query = next(iter(tensors.items()))
    for name, x in tensors.items():
        _check_jagged(name, x, dimensions)
        if x.shape[1] != query.shape[1] and not torch.equal(x.offsets(), query.offsets()):
            raise ValueError(
                f"{name} has sequences at the offsets {_shown(x.offsets())} and {first} at {_shown(query.offsets())}; the same "
                f"are needed ({name} = torch.nested.nested_tensor_from_jagged(values, {first}.offsets()))"
            )
    return [x.values() for x in tensors.values()], query.offsets().int()


def nested_like(like: Any, rows: Tensor) -> Tensor:
    """Return `rows` `(total, ...)` as a jagged tensor of the sequences of `like`."""
    nested: Tensor = torch.nested.nested_tensor_from_jagged(rows, like.offsets())
    return nested


def _check_jagged(name: str, x: Any, dimensions: int) -> None:
    wanted = ("batch", "j", "heads", "head_dim") if dimensions == 4 else ("batch", "j", "embed_dim")
    needed = f"a jagged tensor ({', '.join(wanted)}) is needed"
    if not is_nested(x):
        raise TypeError(f"{name} is a plain {type(x).__name__} beside a nested one; {needed} ({_MAKE})")
    if x.layout is not torch.jagged:
        raise TypeError(
            f"{name} is nested with layout {x.layout}; {needed} ({_MAKE}). nn.TransformerEncoder makes such of a mask, unless it "
            "is built with enable_nested_tensor=False, or its layer held dilkit's module already"
        )
    if x.dim() != dimensions:
        raise ValueError(f"{name} has {x.dim()} dimensions; {needed}")
    if x._ragged_idx != 1:
        raise ValueError(
            f"{name} is transposed, with lengths that differ in dimension {x._ragged_idx}; {needed} (transpose it back)"
        )
    if x.lengths() is not None:
        raise ValueError(f"{name} has rows between its sequences, as narrow() leaves them; {needed} ({name}.contiguous())")


def _shown(offsets: Tensor) -> Sequence[int] | str:
    return offsets.tolist() if len(offsets) <= 8 else f"{[*offsets[:8].tolist()]}..."
