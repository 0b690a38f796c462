"""`dilated_attention_varlen`: dilated attention of sequences of different lengths, packed one after the other.

Nested tensors of `torch.nested`, layout `torch.jagged`, are such sequences, with where each of them begins:

jagged   (batch, j, heads, head_dim)       values()   (total, heads, head_dim)       all sequences one after the other
                                           offsets()  (batch + 1,)                   cu_seqlens
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.checks import boolean, integer
from dilkit.inputs import Inputs
from dilkit.op.arguments import call_of
from dilkit.op.boundary import check_tensor
from dilkit.op.offsets import equal_widths, with_offset
from dilkit.op.operators import attend
from dilkit.op.sequences import check_cu_seqlens
from dilkit.pattern import Pattern

_MAKE = "torch.nested.nested_tensor([...], layout=torch.jagged)"
_MOST_ROWS = 2**31 - 1
"""No sequence has more: `cu_seqlens` is int32."""


def dilated_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    cu_seqlens: Tensor,
    max_seqlen: int | None = None,
    *,
    cu_seqlens_k: Tensor | None = None,
    query_offset: Tensor | None = None,
    is_causal: bool = False,
    sink: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    bias: Bias | None = None,
    softcap: float | None = None,
    backend: str | Sequence[str] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute dilated attention of packed sequences: `dilated_attention` of each of them, in one call.

        out[s:t] = dilated_attention(query[s:t], key[s:t], value[s:t], pattern)    for s, t = cu_seqlens[b], cu_seqlens[b + 1]

    The pattern restarts with each sequence, and nothing of a neighbour is seen, be it NaN. A sequence may be empty.

    - `query`: `(total, heads, head_dim)`, float64, float32, bfloat16 or float16, with a contiguous last dimension.
    - `key`, `value`: `(total, kv_heads, head_dim)` like `query`; `kv_heads` divides `heads`.
    - `cu_seqlens`: int32 `(sequences + 1,)` on the device of `query`, as in flash-attn: where each sequence begins, and `total`.
    - `cu_seqlens_k`: where the keys of each sequence begin, if they are others than the queries; `key` is then of as many rows
      as it says. Query i of a sequence has the position `query_offset + i` among its keys: int32 `(sequences,)`, by default as
      in `dilated_attention`, for each sequence by itself.
    - `max_seqlen`: the length of the longest sequence, or more. On a GPU the numbers of `cu_seqlens` are then checked by the GPU
      alone: of wrong ones a later call says "device-side assert triggered". Otherwise they are checked at once.
    - `is_causal`, `sink`, `scale`, `dropout_p`, `backend`, `return_lse`: as in `dilated_attention`. Sequence b drops the weights
      that element b of a batch would.
    - `bias`, `softcap`: as there; positions restart with each sequence, coordinates are `(total, 1 to 3)`.

    Returns `out`, with the shape and dtype of `query`; with `return_lse` also `lse` `(heads, total)`. Both are differentiable
    once. With backend `native` they are those of one call for each sequence, to the bit. Raises ValueError or TypeError for
    arguments that do not fit, and `NoBackendError` (a ValueError) if no backend, or none of those asked for, can compute it.

    Example, sequences of 5, 0 and 11 tokens:

        >>> import torch
        >>> from dilkit import Pattern, dilated_attention, dilated_attention_varlen
        >>> query, key, value = torch.randn(3, 16, 4, 8).unbind()
        >>> cu_seqlens = torch.tensor([0, 5, 5, 16], dtype=torch.int32)
        >>> pattern = Pattern([4, 16], [1, 4])
        >>> out = dilated_attention_varlen(query, key, value, pattern, cu_seqlens, is_causal=True)
        >>> alone = dilated_attention(*(x[None, 5:] for x in (query, key, value)), pattern, is_causal=True)
        >>> torch.allclose(out[5:], alone[0])
        True
    """
    query, key, value = (batch_of_one(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    query, key, value, scale, width = equal_widths(query, key, value, scale)
    boolean("return_lse", return_lse)
    check_cu_seqlens(cu_seqlens, query, query.shape[1])
    if cu_seqlens_k is not None:
        check_cu_seqlens(cu_seqlens_k, key, key.shape[1], "cu_seqlens_k", "key")
    if max_seqlen is not None and not isinstance(max_seqlen, torch.SymInt):
        max_seqlen = min(integer("max_seqlen", max_seqlen, at_least=0), _MOST_ROWS)
    inputs = Inputs(query, key, value, cu_seqlens=cu_seqlens, sink=sink, cu_seqlens_k=cu_seqlens_k)
    if query_offset is not None:
        inputs, _ = with_offset(inputs, query_offset)
    out, lse = attend(*call_of(inputs, pattern, is_causal, scale, backend, dropout_p, bias, softcap, max_seqlen))
    out = out.squeeze(0) if width is None else out.squeeze(0)[..., :width]
    return (out, lse.squeeze(0)) if return_lse else out


def batch_of_one(name: str, x: object) -> Tensor:
    """Return packed rows `(total, heads, head_dim)` as a batch of one. Raises TypeError or ValueError for other dimensions."""
    rows = check_tensor(name, x)
    if rows.dim() != 3:
        needed = "(total, heads, head_dim) is needed, all sequences one after the other"
        raise ValueError(f"{name} has shape {tuple(rows.shape)}; {needed}")
    return rows.unsqueeze(0)


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
            way = f"the same are needed ({name} = torch.nested.nested_tensor_from_jagged(values, {first}.offsets()))"
            raise ValueError(f"{name} has the offsets {_shown(x.offsets())} and {first} {_shown(query.offsets())}; {way}")
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
        way = "nn.TransformerEncoder makes such of a mask, unless built with enable_nested_tensor=False"
        raise TypeError(f"{name} is nested with layout {x.layout}; {needed} ({_MAKE}). {way}")
    if x.dim() != dimensions:
        raise ValueError(f"{name} has {x.dim()} dimensions; {needed}")
    if x._ragged_idx != 1:
        raise ValueError(f"{name} is transposed, ragged in dimension {x._ragged_idx}; {needed} (transpose it back)")
    if x.lengths() is not None:
        raise ValueError(f"{name} has rows between its sequences, as narrow() leaves them; {needed} ({name}.contiguous())")


def _shown(offsets: Tensor) -> Sequence[int] | str:
    return offsets.tolist() if len(offsets) <= 8 else f"{[*offsets[:8].tolist()]}..."
