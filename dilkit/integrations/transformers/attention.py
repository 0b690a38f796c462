"""The attention function: what is refused, and which call of dilkit computes the rest.

the rows are those of the keys      no padding          dilated_attention
                                    padding, packed     dilated_attention_varlen, of the tokens alone
the rows are the last of them       a cache             dilated_attention_with_kvcache
                                    a dilated_cache     DilatedCache.attend
                                    with gradients,     all rows, those before with queries of 0
                                        or with dropout
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from dilkit.attention import dilated_attention
from dilkit.integrations.transformers.cached import KEPT_BY, last_rows
from dilkit.integrations.transformers.packing import Packing, of_positions, of_tokens
from dilkit.integrations.transformers.patterns import Patterns, pattern_of, stated_patterns
from dilkit.packed.attention import dilated_attention_varlen
from dilkit.pattern import Pattern, SlidingWindow

REFUSED = {
    "softcap": "scores are not capped; take a configuration without it",
    "position_bias": "nothing is added to the scores; take a model with rotary or absolute positions",
    "cache": "the paged cache of continuous batching is not read; take a DynamicCache or a StaticCache",
    "output_attentions": "there is no matrix of weights; take the attention 'eager', or dilkit.attention_rows",
}
"""Arguments that ask for another attention, with the reason."""


def attend(
    given: Patterns | None,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers: `(batch, heads, rows, head_dim)` in, `(batch, rows, heads, head_dim)` out.

    `given`: the patterns of `register`. Raises ValueError, with the reason, for what dilated attention does not compute.
    """
    _refuse(module, query, attention_mask, options)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    pattern, width = pattern_of(given, module), value.shape[-1]
    if stated_patterns(given, module.config) is None:
        _check_window(module, pattern, causal, options)
    if width < query.shape[-1]:
        value = F.pad(value, (0, query.shape[-1] - width))  # zeros, to the width of the keys; they are cut off again
    if (layer := getattr(key, KEPT_BY, None)) is not None:
        layer.handed_on = False
        _check_kept(causal, attention_mask, dropout)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return layer.attend(q, k, v, pattern, sink=s_aux, scale=scaling)[..., :width], None
    packing = _packing(query, key.shape[2], attention_mask, options)
    seen = key.shape[2] if attention_mask is None else attention_mask.shape[1]
    q, k, v = query.transpose(1, 2), key[:, :, :seen].transpose(1, 2), value[:, :, :seen].transpose(1, 2)
    call: dict[str, Any] = dict(sink=s_aux, scale=scaling)
    if q.shape[1] == seen:
        out = _all_rows(q, k, v, pattern, packing, is_causal=causal, dropout_p=dropout, **call)
    elif not causal:
        raise ValueError(f"{q.shape[1]} rows see {seen} keys without causality; dilated attention is of one sequence with itself")
    elif _by_cache(q, k, attention_mask, dropout):
        out = last_rows(q, k, v, pattern, attention_mask, **call)
    else:
        whole = F.pad(q, (0, 0, 0, 0, seen - q.shape[1], 0))
        packing = None if attention_mask is None else of_tokens(attention_mask)
        out = _all_rows(whole, k, v, pattern, packing, is_causal=True, dropout_p=dropout, **call)[:, -q.shape[1] :]
    return out[..., :width], None


def _refuse(module: Any, query: Tensor, mask: Tensor | None, options: dict[str, Any]) -> None:
    for name, reason in REFUSED.items():
        if options.get(name) not in (None, False):
            raise ValueError(f"{name}={options[name]!r} of {type(module).__name__}: {reason}")
    config = module.config
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"{type(config).__name__} has cross-attention, of two sequences; dilated attention is of one sequence with itself"
        )
    if mask is not None and (mask.dim() != 2 or mask.dtype != torch.bool or mask.shape[0] != query.shape[0]):
        raise ValueError(
            f"attention_mask is {mask.dtype} {tuple(mask.shape)}; a bool mask (batch, seen) of the tokens is needed: "
            "what sees what is for the pattern to say"
        )


def _check_kept(causal: bool, mask: Tensor | None, dropout: float) -> None:
    """Raise ValueError for what a `DilatedCache` does not compute."""
    if mask is not None:
        raise ValueError(
            "attention_mask has padding, but all sequences of a dilated_cache() have the same length; give a DynamicCache, or "
            "each sequence by itself"
        )
    if not causal or dropout > 0:
        raise ValueError("a dilated_cache() is for decoding: causal, without dropout; give model.eval()")


def _check_window(module: Any, pattern: Pattern, causal: bool, options: dict[str, Any]) -> None:
    """Raise ValueError where `own_pattern` of a layer is not what transformers computes of it."""
    windows = [branch.window for branch in pattern.branches if isinstance(branch, SlidingWindow)]
    window = windows[0] if windows else None
    if window is not None and not causal:
        raise ValueError(
            f"sliding_window={window} of {type(module).__name__} without causality: models differ in how far a window reaches; "
            f"give the pattern, such as Pattern.of(SlidingWindow({window + 1})) for |i - j| <= {window}"
        )
    if options.get("sliding_window", window) != window:
        raise ValueError(
            f"sliding_window={options['sliding_window']} of {type(module).__name__}, but by the configuration it is {window} in "
            f"layer {module.layer_idx}; give the pattern of each layer, register([...])"
        )


def _packing(query: Tensor, key_rows: int, mask: Tensor | None, options: dict[str, Any]) -> Packing | None:
    """The sequences of the rows of a call; None where each element of the batch is one, or there is a cache."""
    batch, _, rows, _ = query.shape
    cu_seqlens = options.get("cu_seq_lens_q")
    if cu_seqlens is not None:
        if key_rows != rows:
            raise ValueError(
                f"cu_seq_lens_q with {rows} rows and {key_rows} keys; packed sequences have no cache (use_cache=False)"
            )
        if (other := options.get("cu_seq_lens_k")) is not None and other.shape != cu_seqlens.shape:
            raise ValueError(
                f"cu_seq_lens_q has shape {tuple(cu_seqlens.shape)} and cu_seq_lens_k {tuple(other.shape)}; the same is needed: "
                "dilated attention is of one sequence with itself"
            )
        longest = options.get("max_length_q")
        return Packing(cu_seqlens.int(), batch * rows if longest is None else int(longest))
    if mask is None:
        return of_positions(options.get("position_ids"), batch, rows)
    return of_tokens(mask) if mask.shape[1] == rows else None


def _all_rows(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, packing: Packing | None, **call: Any) -> Tensor:
    if packing is None:
        return cast(Tensor, dilated_attention(query, key, value, pattern, **call))
    batch, seq = query.shape[:2]
    q, k, v = map(packing.pack, (query, key, value))
    out = dilated_attention_varlen(q, k, v, pattern, packing.cu_seqlens, packing.longest, **call)
    return packing.unpack(cast(Tensor, out), batch, seq)


def _by_cache(query: Tensor, key: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Whether the last rows can be taken from a cache: all are tokens, none wants a gradient, and no weight is dropped."""
    rows = query.shape[1]
    if dropout > 0 or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)):
        if mask is not None and rows == 1 and not bool(mask[:, -1].all()):
            raise ValueError(
                "one row against a cache of fixed size has neither gradients nor dropout; take a DynamicCache, or model.eval() "
                "and torch.no_grad()"
            )
        return False
    return mask is None or rows == 1 or (not torch.compiler.is_compiling() and bool(mask[:, -rows:].all()))
