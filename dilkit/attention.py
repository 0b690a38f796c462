"""`dilated_attention`: one sequence, or a batch of sequences that are equally long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.checks import boolean
from dilkit.inputs import Inputs
from dilkit.op._facts import call_key
from dilkit.op.arguments import call_of
from dilkit.op.offsets import equal_widths, with_offset
from dilkit.op.operators import attend
from dilkit.packed.attention import attend_nested
from dilkit.pattern import Pattern


def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    bias: Bias | None = None,
    softcap: float | None = None,
    block_layout: Tensor | None = None,
    intervals: Tensor | None = None,
    query_offset: int | Tensor | None = None,
    backend: str | Sequence[str] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Dilated attention, exact (LongNet, arXiv 2307.02486, eq. 4-15).

        out[i] = softmax_j(scale * q_i . k_j + log count[h, i, j]) . v        lse[i] = logsumexp of the same row

    With `softcap` and `bias` the score is `softcap * tanh(scale * q_i . k_j / softcap) + bias(h, i, j) + log count[h, i, j]`.
    `count[h, i, j]` is the pattern's (`dilkit.Pattern`): how many times query i of head h sees key j. A row that sees no key has
    `out = 0`, `lse = -inf` and zero gradients.

    - `query`: `(batch, seq, heads, head_dim)`, float64, float32, bfloat16 or float16, with a contiguous last dimension.
    - `key`, `value`: `(batch, keys, kv_heads, head_dim)` like `query`; `kv_heads` divides `heads`. `value` may have another
      head_dim, which is then that of `out`.
    - `is_causal`: the count is 0 for j > i.
    - `key_padding_mask`: bool `(batch, seq)`; the count is 0 for keys where it is True.
    - `sink`: floating-point `(heads,)`, a learned logit for each head, with a gradient: that of one more key, of value 0, which
      every row of the head sees (gpt-oss, arXiv 2508.10925; StreamingLLM, arXiv 2309.17453). The results are then

          lse' = log(exp(lse) + exp(sink))        out' = out * exp(lse - lse')

    - `scale`: the factor of the scores, by default `head_dim ** -0.5`.
    - `dropout_p`: the probability with which a weight is dropped, from 0 up to but without 1; the others are multiplied by `1 /
      (1 - dropout_p)`, and `lse` is of all. The seed, drawn from torch's default generator of the CPU (`torch.manual_seed`), and
      the place of a weight alone decide, the same on every backend.
    - `bias`: what is added to the scores by head and position: `dilkit.Alibi`, `CoordinateAlibi`, a table, `RowTable` by query,
      of the heads of `query`. Its slopes or table may require a gradient. Zero keys and sinks have no bias.
    - `softcap`: scores are `softcap * tanh(score / softcap)`, before the bias (Gemma 2, arXiv 2408.00118).
    - `block_layout`: which blocks see which, where the pattern has a branch `BlockSparse(None, block_size)`; no plan is made of
      it. Bools `(batch or 1, heads or 1, blocks, blocks)` for rows and columns of blocks, or the numbers of the blocks that each
      block of queries sees, int64 or int32 `(batch or 1, kv_heads or 1, blocks, k)`, -1 for none.
    - `intervals`: the keys that each query sees, where the pattern has a branch `Intervals(None, most=k)`: int32 `(batch or 1,
      heads or 1, seq, k, 2)`, the first key of each interval and the one after its last, ascending and without overlap. One whose
      begin is not before its end is none.
    - `query_offset`: the position of the first query among the keys, an integer, or int32 `(batch,)`. By default, with as many
      queries as keys, query i is key i; with other numbers of both, the last query is the last key under causality, and else
      the first query has the position 0. Queries before the first key see what windows and strides show them. Under
      `torch.compile(fullgraph=True)` an offset that changes has to be a tensor.
    - `backend`: a name, or names in order of preference. By default `dilkit.use_backend` decides, then `DILKIT_BACKEND`, then
      what suits the problem and the device (`dilkit.explain`).
    - `return_lse`: whether to return `lse` too.

    Jagged tensors of `torch.nested`, `(batch, j, heads, head_dim)` with the same offsets, are one packed call
    (`dilated_attention_varlen`) and give a jagged `out`, and `lse` `(batch, heads, j)`; they take no `key_padding_mask`.

    Returns `out`, with the shape and dtype of `query`. With `return_lse` it returns `(out, lse)`; `lse` is `(batch, heads, seq)`,
    float32 (float64 for float64). Both are differentiable once. Raises ValueError or TypeError for arguments that do not fit, and
    `NoBackendError` (a ValueError) if no backend, or none of those asked for, can compute the call.

    Example:

        >>> import torch
        >>> from dilkit import Pattern, dilated_attention
        >>> query = torch.randn(1, 64, 4, 8, requires_grad=True)  # (batch, seq, heads, head_dim)
        >>> key = value = torch.randn(1, 64, 2, 8)  # two query heads share each key/value head
        >>> out, lse = dilated_attention(query, key, value, Pattern([16, 64], [1, 4]), is_causal=True, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([1, 64, 4, 8]), torch.Size([1, 4, 64]))
        >>> out.sum().backward()
        >>> query.grad.shape
        torch.Size([1, 64, 4, 8])

    With one branch that keeps every token of the sequence, this is ordinary attention:

        >>> dense = dilated_attention(query, key, value, Pattern.dense())
        >>> q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        >>> torch.allclose(dense, expected.transpose(1, 2), atol=1e-5)
        True
    """
    if type(return_lse) is not bool:
        boolean("return_lse", return_lse)
    width = offset = None
    tensors = query, key, value, key_padding_mask, None, None, None, None, block_layout, sink, None, None, intervals
    is_traced = torch.compiler.is_compiling()
    inputs = Inputs(*tensors) if is_traced else tuple.__new__(Inputs, tensors)  # which is 1 % of a call on 16 tokens faster
    if query_offset is not None:
        inputs, offset = with_offset(inputs, query_offset)
    facts = None if is_traced else call_key(inputs)
    if facts is None:  # also of nested tensors, and where key and value differ in width
        if getattr(query, "is_nested", False):
            options: Any = dict(is_causal=is_causal, sink=sink, scale=scale, dropout_p=dropout_p, backend=backend)
            options |= dict(bias=bias, softcap=softcap)
            for name, one in dict(block_layout=block_layout, intervals=intervals, query_offset=query_offset).items():
                if one is not None:
                    raise ValueError(f"{name} does not support jagged tensors; compute sequences of one length as a batch")
            return attend_nested(query, key, value, pattern, key_padding_mask, return_lse, **options)
        query, key, value, scale, width = equal_widths(query, key, value, scale)
        inputs = inputs._replace(query=query, key=key, value=value)
    out, lse = attend(
        *call_of(inputs, pattern, is_causal, scale, backend, dropout_p, bias, softcap, query_offset=offset, key=facts)
    )
    out = out if width is None else out[..., :width]
    return (out, lse) if return_lse else out
