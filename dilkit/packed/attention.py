"""`dilated_attention_varlen`: dilated attention of sequences of different lengths, packed one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.checks import boolean, integer
from dilkit.inputs import Inputs
from dilkit.op.arguments import call_of
from dilkit.op.operators import attend
from dilkit.op.sequences import check_cu_seqlens
from dilkit.pattern import Pattern

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

    The pattern begins anew with each sequence, and nothing of a neighbour is seen, be it NaN. A sequence may be empty.

    - `query`: `(total, heads, head_dim)`, float64, float32, bfloat16 or float16, with any strides but a contiguous last
      dimension.
    - `key`, `value`: `(total, kv_heads, head_dim)` like `query`; `kv_heads` divides `heads`.
    - `cu_seqlens`: int32 `(sequences + 1,)` on the device of `query`, as in flash-attn: where each sequence begins, and `total`.
    - `max_seqlen`: the length of the longest sequence, or more. On a GPU the numbers of `cu_seqlens` are then checked by the GPU
      alone, for which nothing waits: of wrong ones a later call says "device-side assert triggered". Without it, and on a CPU
      always, they are checked at once.
    - `is_causal`, `sink`, `scale`, `dropout_p`, `backend`, `return_lse`: as in `dilated_attention`. Sequence b drops the weights
      that element b of a batch would.
    - `bias`, `softcap`: as there; positions begin anew with each sequence, coordinates are `(total, 1 to 3)`.

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
    boolean("return_lse", return_lse)
    check_cu_seqlens(cu_seqlens, query, query.shape[1])
    if max_seqlen is not None and not isinstance(max_seqlen, torch.SymInt):
        max_seqlen = min(integer("max_seqlen", max_seqlen, at_least=0), _MOST_ROWS)
    inputs = Inputs(query, key, value, cu_seqlens=cu_seqlens, sink=sink)
    out, lse = attend(*call_of(inputs, pattern, is_causal, scale, backend, dropout_p, bias, softcap, max_seqlen))
    return (out.squeeze(0), lse.squeeze(0)) if return_lse else out.squeeze(0)


def batch_of_one(name: str, x: object) -> Tensor:
    """Return packed rows `(total, heads, head_dim)` as a batch of one. Raises TypeError or ValueError for other dimensions."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor is needed")
    if x.dim() != 3:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; (total, heads, head_dim) is needed, all sequences one after the other"
        )
    return x.unsqueeze(0)
