"""The attention function: which call of dilkit computes what a layer asks for.

the rows are those of the keys      no padding          dilated_attention
                                    padding, packed     dilated_attention_varlen, of the tokens alone
                                    padding between     dilated_attention of each sequence, if distances count padding
the rows are the last of them       a cache             dilated_attention_with_kvcache
                                    a dilated_cache     DilatedCache.attend
                                    with gradients,     all rows, those before with queries of 0
                                        or with dropout
the rows are those of a batch       generate_batch      one step over transformers' pool, dilated_attention_varlen of prompts
the rows are a part of a sequence   context_parallel    ring_dilated_attention, ring_dilated_attention_varlen
the keys are of another sequence    cross-attention     dilated_attention of all rows and tokens, by a dense pattern
a mask of pairs                     a few runs a row    dilated_attention of these intervals
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from dilkit.attention import dilated_attention
from dilkit.decoding.kvcache import dilated_attention_with_kvcache
from dilkit.integrations.ranks import nothing_seen
from dilkit.integrations.transformers.across import attend_across, is_across
from dilkit.integrations.transformers.biases.tables import PositionBias
from dilkit.integrations.transformers.checks import (
    check_continuous,
    check_decoding,
    check_options,
    check_shown,
    checked_mask,
    holder_of,
    wants_weights,
)
from dilkit.integrations.transformers.context.attention import KEPT_AS
from dilkit.integrations.transformers.continuous import attend_batch
from dilkit.integrations.transformers.heads import held_heads, on_held_heads, sinks_of
from dilkit.integrations.transformers.mask_intervals import attend_by_intervals
from dilkit.integrations.transformers.patterns import DENSE, Patterns, pattern_of_layer, stated_patterns
from dilkit.integrations.transformers.sequences import KEPT_BY, Packing, TokenMask, of_tokens, packing_of
from dilkit.integrations.transformers.weights import weights_of
from dilkit.op.offsets import equal_widths
from dilkit.packed.attention import dilated_attention_varlen
from dilkit.pattern import Pattern, SlidingWindow


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
) -> tuple[Tensor, Tensor | None]:
    """Attend as a function of transformers: `(batch, heads, rows, head_dim)` in, `(batch, rows, heads, head_dim)` out.

    `given`, `mesh`: those of `register`. `attention_mask`: of `tokens_seen`; if None, the layer says what is causal. Raises
    ValueError.
    """
    if is_across(module, options):
        options |= dict(is_causal=is_causal, s_aux=s_aux)
        return attend_across(module, query, key, value, attention_mask, dropout, scaling, options)
    check_options(module, options, key)
    weighed = wants_weights(module, options, dropout, holder_of(module, key, options))
    stated = stated_patterns(given, module.config)
    pattern_of_all = pattern_of_layer(stated, module)
    bias: PositionBias | None = options.get("position_bias")
    mask = checked_mask(attention_mask, module, query, key, takes_pairs=True)
    causal = None if mask is None else mask.causal
    if causal is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    width, held = value.shape[-1], held_heads(module, query.shape[1], key.shape[1])
    pattern = on_held_heads(pattern_of_all, module, held, mesh)
    if pattern is None:
        return nothing_seen(query, key, value).transpose(1, 2), None
    check_shown(module, query, key, pattern, stated, mask, options)
    q, k, v, scaling, _ = equal_widths(query, key, value, scaling)  # zeros, which are cut off again
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    call: dict[str, Any] = dict(sink=sinks_of(s_aux, module, pattern, held, mesh), scale=scaling, softcap=options.get("softcap"))
    if bias is not None:
        call["bias"] = bias.on(q.device)
    if (layer := getattr(key, KEPT_BY, None)) is not None:
        layer.claim()
        check_decoding(causal, mask, dropout, options)
        return layer.attend(q, k, v, pattern, **call)[..., :width], None
    if options.get("cache") is not None:
        check_continuous(module, len(q), causal, dropout, options)
        return attend_batch(module.layer_idx, q, k, v, pattern, options, **call), None
    if (ranks := getattr(module, KEPT_AS, None)) is not None:
        out = ranks.attend(q, k, v, pattern, mask, options, is_causal=causal, dropout_p=dropout, **call)
        return out[..., :width], None
    if mask is not None and mask.intervals is not None:
        return attend_by_intervals(q, k, v, mask.intervals, width, dropout, weighed, **call)
    packing, tokens = packing_of(q, key.shape[2], mask, options), None if mask is None else mask.tokens
    harmless = counts_no_padding_in(pattern, bias, stated)
    between = mask is not None and harmless is not None and mask.has_gaps(harmless)
    if between and tokens is not None:
        out = in_places(q, k, v, pattern, tokens, is_causal=causal, dropout_p=dropout, **call)
    else:
        out = _of_rows(q, k, v, pattern, packing, tokens, causal, dropout, call)
    if weighed and tokens is None and packing is not None:
        wants_weights(module, options, refused="packed sequences")
    weights = weights_of(q, k, pattern, tokens, between, is_causal=causal, **call) if weighed else None
    return out[..., :width], weights


def counts_no_padding_in(pattern: Pattern, bias: PositionBias | None, stated: object) -> int | None:
    """Return in how many places padding between tokens makes no difference; None where it never does.

    Else it keeps its place, as in transformers: beside windows, strides, biases that count it, and the chunks of a model.
    """
    if bias is not None:
        return 0 if bias.counts_padding else None
    if not any(branch.goes_by_distance for branch in pattern.branches):
        return None if stated is not None or pattern == DENSE else 0
    whole = [min(x.reaches) + 1 for x in pattern.branches if isinstance(x, SlidingWindow) and x.dilation_rate == 1]
    return min(whole) if len(whole) == len(pattern.branches) else 0


def in_places(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, tokens: Tensor, **call: Any) -> Tensor:
    """Attend in each sequence from its first to its last token, where padding between them is seen by none.

    The rows are the last of `tokens`, bool `(batch, seen)`; one row is the last token, also in a cache of fixed size.
    """
    outs, rows = [], query.shape[1]
    for i, places in enumerate(tokens):
        seen = places.nonzero()
        if not len(seen):
            outs.append(nothing_seen(query[i : i + 1], key[i : i + 1], value[i : i + 1]))
            continue
        first, end = int(seen[0]), int(seen[-1]) + 1
        before = end - 1 if rows == 1 else len(places) - rows  # the place of the first row
        part = slice(max(first - before, 0), max(end - before, 0))
        q, (k, v) = query[i : i + 1, part], (x[i : i + 1, first:end] for x in (key, value))
        out = dilated_attention(
            q, k, v, pattern, key_padding_mask=~places[None, first:end], query_offset=before + part.start - first, **call
        )
        outs.append(F.pad(cast(Tensor, out), (0, 0, 0, 0, part.start, rows - part.start - q.shape[1])))
    return torch.cat(outs)


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
    learned = (q, k, v, call["sink"], None if (bias := call.get("bias")) is None else bias.weights)
    if _by_cache(q.shape[1], learned, tokens, dropout):
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


def _by_cache(rows: int, learned: Iterable[Tensor | None], mask: Tensor | None, dropout: float) -> bool:
    """True if the last rows can be taken from a cache: all are tokens, none wants a gradient, and no weight is dropped."""
    if dropout > 0 or (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in learned)):
        if mask is not None and rows == 1 and not bool(mask[:, -1].all()):
            raise ValueError(
                "one row against a cache of fixed size, or in a batch with padding behind tokens, has neither gradients nor "
                "dropout; take a DynamicCache and padding in front, or model.eval() and torch.no_grad()"
            )
        return False
    return mask is None or rows == 1 or (not torch.compiler.is_compiling() and bool(mask[:, -rows:].all()))


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
