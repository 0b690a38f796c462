"""The attention function: which call of dilkit computes what a layer asks for.

the rows are those of the keys      no padding          dilated_attention
                                    padding, packed     dilated_attention_varlen, of the tokens alone
the rows are the last of them       a cache             dilated_attention_with_kvcache
                                    a dilated_cache     DilatedCache.attend
                                    with gradients,     all rows, those before with queries of 0
                                        or with dropout
the rows are those of a batch       generate_batch      one step over transformers' pool, dilated_attention_varlen of prompts
the rows are a part of a sequence   context_parallel    ring_dilated_attention, ring_dilated_attention_varlen
the keys are of another sequence    T5's decoder        torch's scaled_dot_product_attention, of all rows and tokens
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from dilkit.attention import dilated_attention
from dilkit.decoding.kvcache import dilated_attention_with_kvcache
from dilkit.integrations.ranks import nothing_seen
from dilkit.integrations.transformers.biases.tables import PositionBias
from dilkit.integrations.transformers.checks import (
    check_continuous,
    check_decoding,
    check_one_sequence,
    check_options,
    check_window,
    checked_mask,
)
from dilkit.integrations.transformers.context.attention import KEPT_AS
from dilkit.integrations.transformers.continuous import attend_batch
from dilkit.integrations.transformers.heads import held_heads, on_held_heads, sinks_of
from dilkit.integrations.transformers.patterns import Patterns, pattern_of, stated_patterns
from dilkit.integrations.transformers.sequences import KEPT_BY, Packing, TokenMask, of_tokens, packing_of
from dilkit.packed.attention import dilated_attention_varlen
from dilkit.pattern import Pattern


def attend(
    given: Patterns | None,
    mesh: Any,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: TokenMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as a function of transformers: `(batch, heads, rows, head_dim)` in, `(batch, rows, heads, head_dim)` out.

    `given`, `mesh`: those of `register`. `attention_mask`: of `tokens_seen`; if None, the layer says what is causal. Raises
    ValueError.
    """
    bias: PositionBias | None = options.get("position_bias")
    if isinstance(bias, PositionBias) and bias.make is None:
        return attend_across(module, query, key, value, attention_mask, dropout, scaling), None
    check_options(module, options, key)
    if bias is None:
        check_one_sequence(module)
    mask = checked_mask(attention_mask, module, query, key)
    causal = None if mask is None else mask.causal
    if causal is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    width, held = value.shape[-1], held_heads(module, query.shape[1], key.shape[1])
    pattern = on_held_heads(pattern_of(given, module), module, held, mesh)
    if pattern is None:
        return nothing_seen(query, key, value).transpose(1, 2), None
    if stated_patterns(given, module.config) is None:
        check_window(module, pattern, causal, mask, options)
    if width < query.shape[-1]:
        value = F.pad(value, (0, query.shape[-1] - width))  # zeros, to the width of the keys; they are cut off again
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    call: dict[str, Any] = dict(sink=sinks_of(s_aux, module, pattern, held, mesh), scale=scaling)
    if (layer := getattr(key, KEPT_BY, None)) is not None:
        layer.claim()
        check_decoding(causal, mask, dropout, options)
        return layer.attend(q, k, v, pattern, **call)[..., :width], None
    call["softcap"] = options.get("softcap")
    if options.get("cache") is not None:
        check_continuous(module, len(q), causal, dropout, options)
        return attend_batch(module.layer_idx, q, k, v, pattern, options, **call), None
    if (ranks := getattr(module, KEPT_AS, None)) is not None:
        out = ranks.attend(q, k, v, pattern, mask, options, is_causal=causal, dropout_p=dropout, **call)
        return out[..., :width], None
    call["bias"] = None if bias is None else bias.of_call(mask, type(module).__name__, q.device)
    packing, tokens = packing_of(q, key.shape[2], mask, options), None if mask is None else mask.tokens
    return _of_rows(q, k, v, pattern, packing, tokens, causal, dropout, call)[..., :width], None


def _of_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    packing: Packing | None,
    tokens: Tensor | None,
    causal: bool,
    dropout: float,
    call: dict[str, Any],
) -> Tensor:
    seen = k.shape[1] if tokens is None else tokens.shape[1]
    k, v = k[:, :seen], v[:, :seen]
    if q.shape[1] == seen:
        return _all_rows(q, k, v, pattern, packing, is_causal=causal, dropout_p=dropout, **call)
    if not causal:
        raise ValueError(f"{q.shape[1]} rows see {seen} keys without causality; dilated attention is of one sequence with itself")
    if _by_cache(q, k, tokens, dropout):
        return last_rows(q, k, v, pattern, tokens, **call)
    whole = F.pad(q, (0, 0, 0, 0, seen - q.shape[1], 0))
    unpadded = None if tokens is None else of_tokens(tokens)
    return _all_rows(whole, k, v, pattern, unpadded, is_causal=True, dropout_p=dropout, **call)[:, -q.shape[1] :]


def _all_rows(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, packing: Packing | None, **call: Any) -> Tensor:
    if packing is None:
        return cast(Tensor, dilated_attention(query, key, value, pattern, **call))
    batch, seq = query.shape[:2]
    q, k, v = map(packing.pack, (query, key, value))
    out = dilated_attention_varlen(q, k, v, pattern, packing.cu_seqlens, packing.longest, **call)
    return packing.unpack(cast(Tensor, out), batch, seq)


def _by_cache(query: Tensor, key: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """True if the last rows can be taken from a cache: all are tokens, none wants a gradient, and no weight is dropped."""
    rows = query.shape[1]
    if dropout > 0 or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)):
        if mask is not None and rows == 1 and not bool(mask[:, -1].all()):
            raise ValueError(
                "one row against a cache of fixed size has neither gradients nor dropout; take a DynamicCache, or model.eval() "
                "and torch.no_grad()"
            )
        return False
    return mask is None or rows == 1 or (not torch.compiler.is_compiling() and bool(mask[:, -rows:].all()))


def attend_across(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: TokenMask | None, dropout: float, scaling: float | None
) -> Tensor:
    """Compute cross-attention by torch, like `attend`. Raises ValueError for keys of a cache that leaves some out."""
    if getattr(key, KEPT_BY, None) is not None:
        raise ValueError(
            f"{type(module).__name__} is cross-attention, which a dilated_cache() does not compute; take a DynamicCache"
        )
    checked = checked_mask(mask, module, query, key)
    tokens = None if checked is None or checked.tokens is None else checked.tokens[:, None, None]
    out = F.scaled_dot_product_attention(query, key, value, tokens, dropout_p=dropout, scale=scaling)
    return out.transpose(1, 2)


def last_rows(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, tokens: Tensor | None, **options: Any) -> Tensor:
    """Attend from the last rows to keys `(batch, seen, kv_heads, head_dim)`, of which bool `tokens` `(batch, seen)` are some."""

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
    """Return the first token of each sequence; None where tokens are no run, or a copy is cheaper (GPUs, torch.compile)."""
    if torch.compiler.is_compiling() or tokens.device.type != "cpu":
        return None
    first, places = tokens.int().argmax(1), torch.arange(tokens.shape[1])
    run = (places >= first[:, None]) & (places < (first + lengths)[:, None])
    return cast("list[int]", first.tolist()) if torch.equal(run, tokens) else None
