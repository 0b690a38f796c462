"""ALiBi of Bloom and MPT, whose layers compute attention by themselves: here they ask the attention function.

model       alibi of a row of keys, slopes[h] * j       not read: along a row it differs by a constant from
layer       scores + alibi, softmax                     `dilkit.Alibi`: -slopes[h] * (i - j)
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from dilkit.bias.alibi import Alibi, alibi_slopes
from dilkit.integrations.transformers.biases.tables import PositionBias
from dilkit.integrations.transformers.checks import wants_weights
from dilkit.integrations.transformers.sequences import TokenMask

CACHES = ("cache", "layer_past", "past_key_values")
"""The names of the KV cache: in transformers 5.24, in Bloom's layers, and in MPT's before 5.24."""
WITHOUT_EFFECT = ("use_cache", "output_attentions")


def watch_alibi(model: Any, is_ours: Callable[[object], bool]) -> bool:
    """Have Bloom's and MPT's later layers look attention up where `is_ours(name)`. Returns True if the model has such."""
    homes = {kind.__module__ for kind in model.__mro__} & set(LAYERS)
    for home in homes:
        block, layer = (getattr(sys.modules[home], name) for name in LAYERS[home][:2])
        if getattr(layer.forward, "watched_by", None) != __name__:
            block.__call__ = _without_weights(block.__call__)  # not `forward`: one that is replaced makes no checkpoints
            layer.__init__, layer.forward = _knowing(layer.__init__), watched_forward(layer.forward, LAYERS[home][2], is_ours)
    return bool(homes)


def _without_weights(call: Any) -> Any:
    """Wrap `__call__` of a block to refuse `output_attentions`, which not all blocks hand on to their attention."""

    @functools.wraps(call)
    def watched(block: Any, *args: Any, output_attentions: bool = False, **options: Any) -> Any:
        if isinstance(options.get("attention_mask"), TokenMask):
            wants_weights(block, dict(output_attentions=output_attentions), refused="ALiBi")
        return call(block, *args, output_attentions=output_attentions, **options)

    return watched


def _knowing(init: Any) -> Any:
    @functools.wraps(init)
    def knowing(layer: Any, config: Any, *args: Any, **options: Any) -> None:
        init(layer, config, *args, **options)
        layer.config = config

    return knowing


def watched_forward(forward: Any, asking: Any, is_ours: Callable[[object], bool]) -> Any:
    """Return a layer's `forward` that is `asking` instead, where the layer's attention is ours."""

    @functools.wraps(forward)
    def watched(layer: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        config = getattr(layer, "config", None)  # None of a layer that was made before its class was watched
        computed_by_ours = isinstance(options.get("attention_mask"), TokenMask)  # also of a function that calls ours
        asks = config is not None and (computed_by_ours or is_ours(config._attn_implementation))
        return (asking if asks else forward)(layer, hidden_states, *args, **options)

    watched.watched_by = __name__  # type: ignore[attr-defined]
    return watched


def _attended(layer: Any, rows: tuple[Tensor, Tensor, Tensor], mask: Any, bias: PositionBias, **options: Any) -> Tensor:
    interface = sys.modules["transformers"].AttentionInterface()  # torch.compile traces no import
    out: Tensor = interface[layer.config._attn_implementation](layer, *rows, mask, position_bias=bias, **options)[0]
    return out.flatten(2)


def _with_cached(layer: Any, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    caches = [options.pop(name) for name in CACHES if name in options]
    if unknown := sorted(name for name, x in options.items() if name not in WITHOUT_EFFECT and x is not None):
        raise TypeError(
            f"{type(layer).__name__}.forward got {', '.join(unknown)}, which dilkit does not know in its place; use "
            "attn_implementation='eager', or an earlier version of transformers"
        )
    for cache in caches:
        if cache is not None:
            key, value = cache.update(key, value, layer.layer_idx)
    return key, value


def _bloom(
    layer: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Any, cache: Any = None, **options: Any
) -> tuple[Tensor, None]:
    query, key, value = layer._reshape(layer.query_key_value(hidden_states))
    key, value = _with_cached(layer, key, value, cache=cache, **options)
    out = _attended(
        layer,
        (query, key, value),
        attention_mask,
        PositionBias(functools.partial(_slopes, query), counts_padding=False),
        scaling=layer.inv_norm_factor,
        dropout=layer.attention_dropout.p if layer.training else 0.0,
    )
    return residual + F.dropout(layer.dense(out), layer.hidden_dropout, layer.training), None


def _mpt(
    layer: Any, hidden_states: Tensor, position_bias: Tensor, cache: Any = None, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    rows = layer.Wqkv(hidden_states)
    if layer.clip_qkv:
        rows = rows.clamp(min=-layer.clip_qkv, max=layer.clip_qkv)
    query, key, value = rows.unflatten(2, (3, layer.n_heads, layer.head_dim)).permute(2, 0, 3, 1, 4)
    key, value = _with_cached(layer, key, value, cache=cache, **options)
    out = _attended(
        layer,
        (query, key, value),
        attention_mask,
        PositionBias(functools.partial(_slopes, query)),
        scaling=layer.softmax_scale,
        dropout=layer.attn_dropout_p if layer.training else 0.0,
    )
    return layer.out_proj(out), None


def _slopes(query: Tensor) -> Alibi:
    return Alibi(alibi_slopes(query.shape[1]).to(query.device))


LAYERS = {
    "transformers.models.bloom.modeling_bloom": ("BloomBlock", "BloomAttention", _bloom),
    "transformers.models.mpt.modeling_mpt": ("MptBlock", "MptAttention", _mpt),
}
