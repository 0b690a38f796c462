"""`dilated_attention_with_kvcache`: the last rows of sequences against a cache that holds all of their keys and values."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.checks import boolean, real
from dilkit.decoding.layout import check_no_gradient
from dilkit.op.arguments import check_pattern
from dilkit.op.call_options import CallOptions
from dilkit.op.kvcache import check_tensors, last_rows
from dilkit.op.scores import scores_of
from dilkit.op.zero_keys import check_sink
from dilkit.pattern import Pattern
from dilkit.selector import names_of


def dilated_attention_with_kvcache(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pattern: Pattern,
    *,
    key: Tensor | None = None,
    value: Tensor | None = None,
    cache_seqlens: Tensor,
    sink: Tensor | None = None,
    scale: float | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    backend: str | Sequence[str] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal dilated attention of the last rows of sequences, whose keys and values are in a cache.

        k_cache[b, n : n + new] = key[b], v_cache likewise        n = cache_seqlens[b]; nothing without `key` and `value`
        out[b] = dilated_attention(whole query, k_cache[b, : n + new], v_cache[b, : n + new], pattern, is_causal=True)[-rows:]

    The work is that of the rows computed. `dilkit.DilatedCache` keeps only what later rows can still see.

    - `query`: `(batch, rows, heads, head_dim)`, the last rows of each sequence: one, or a chunk, in the dtypes of
      `dilated_attention`.
    - `k_cache`, `v_cache`: `(batch, capacity, kv_heads, head_dim)`, written in place; what lies beyond a sequence is never read.
    - `key`, `value`: `(batch, new, kv_heads, head_dim)`, appended before. Where they are given, each cache needs memory that no
      other of these tensors has a part in, and no two of its elements; views side by side in one tensor are such.
    - `cache_seqlens`: int32 `(batch,)` on the device of `query`: rows of each sequence that are in the cache before. It is not
      changed: add `new` for the next call.
    - `bias`, `softcap`: as in `dilated_attention`; positions are those in the whole sequence, and coordinates are
      `(batch, capacity, 1 to 3)`, of which rows that are yet to come are not read.
    - `sink`, `scale`, `backend`, `return_lse`: as in `dilated_attention`.

    Returns `out`, with the shape and dtype of `query`; with `return_lse` also `lse` `(batch, heads, rows)`. It has no gradient.
    Raises ValueError or TypeError for arguments that do not fit, such as a sequence beyond the capacity, and `NoBackendError` (a
    ValueError) if no backend can compute it; the cache is then unchanged.

    Example, two sequences of which 5 and 2 tokens are in the cache:

        >>> import torch
        >>> from dilkit import Pattern, dilated_attention_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 2, 32, 2, 8)
        >>> cache_seqlens = torch.tensor([5, 2], dtype=torch.int32)
        >>> query, key, value = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8)
        >>> pattern, new = Pattern([4, 16], [1, 2]), dict(key=key, value=value)
        >>> out = dilated_attention_with_kvcache(query, k_cache, v_cache, pattern, **new, cache_seqlens=cache_seqlens)
        >>> out.shape, torch.equal(k_cache[0, 5], key[0, 0]), torch.equal(k_cache[1, 2], key[1, 0])
        (torch.Size([2, 1, 4, 8]), True, True)
    """
    boolean("return_lse", return_lse)
    check_pattern(pattern)
    tensors = query, k_cache, v_cache, key, value, cache_seqlens
    check_tensors(*tensors)
    pattern.check_heads(query.shape[2], k_cache.shape[2])
    if sink is not None:
        check_sink(sink, query)
    scores = scores_of(bias, softcap, query, pattern, k_cache.shape[2], k_cache.shape[1])
    check_no_gradient(query, k_cache, v_cache, key, value, sink, *scores.tensors)
    factor = query.shape[-1] ** -0.5 if scale is None else real("scale", scale)
    backends = () if backend is None else names_of(backend)
    options = CallOptions(pattern, True, False, backends, 0.0, scores.softcap, scores.form, factor)
    out, lse = last_rows(tensors, options, sink, *scores.tensors)
    return (out, lse) if return_lse else out
