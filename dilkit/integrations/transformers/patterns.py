"""The pattern of a layer: from `config.dilkit`, from the call of `register`, or its own window by the configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dilkit.compiler import assume_constant_result
from dilkit.pattern import Pattern, SlidingWindow
from dilkit.pattern.calls import pattern_of_text

Patterns = Pattern | tuple[Pattern | None, ...]
DENSE = Pattern.dense()
_KNOWN: dict[str, Patterns] = {}
WINDOWED, FULL, CHUNKED = LAYER_TYPES = "sliding_attention", "full_attention", "chunked_attention"


def checked(pattern: object) -> Patterns:
    if isinstance(pattern, str):
        return pattern_of_text(pattern)
    if isinstance(pattern, Pattern):
        return pattern
    if not isinstance(pattern, Sequence) or not all(isinstance(x, (Pattern, str)) for x in pattern):
        raise TypeError(
            f"pattern={pattern!r} has the type {type(pattern).__name__}; a dilkit.Pattern is needed, its text such as "
            "'mistral(4096)', or a list of these, one a layer"
        )
    if not pattern:
        raise ValueError("pattern is an empty list; a dilkit.Pattern for each layer is needed")
    return tuple(pattern_of_text(x) if isinstance(x, str) else x for x in pattern)


def to_config(pattern: Patterns | None) -> Any:
    if isinstance(pattern, tuple):
        return [to_config(one) for one in pattern]
    if pattern is None:
        return None  # of a layer that keeps its own attention
    return json.loads(pattern.to_json())


def pattern_of(given: Patterns | None, module: Any) -> Pattern:
    return pattern_of_layer(stated_patterns(given, module.config), module)


def pattern_of_layer(stated: Patterns | None, module: Any) -> Pattern:
    if isinstance(stated, Pattern):
        return stated
    if stated is None:
        return own_pattern(module)
    layer: int | None = getattr(module, "layer_idx", None)
    if layer is None or layer >= len(stated):
        raise ValueError(
            f"there are {len(stated)} patterns, one a layer, but this layer has the number {layer}; "
            "give as many as the model has layers, or one for all of them"
        )
    if (pattern := stated[layer]) is None:
        raise ValueError(
            f"config.dilkit has no pattern for layer {layer}, {type(module).__name__}, which kept its own attention when its "
            "model was converted; a model that is loaded has to be converted again"
        )
    return pattern


def stated_patterns(given: Patterns | None, config: Any) -> Patterns | None:
    """Return the patterns of `config.dilkit`, which are of this model alone, or else those of `register`; None without either."""
    stated = getattr(config, "dilkit", None)
    return given if stated is None else _KNOWN[_known_as(stated)]


def own_pattern(module: Any) -> Pattern:
    """Return a layer's own pattern by its configuration: a window, on both sides of a token in encoders, chunks, or all."""
    config, kind = module.config, kind_of(module)
    if (radius := getattr(module, "local_radius", None)) is not None:  # of LongT5's encoder
        return known_pattern(WINDOWED, radius + 1)
    if kind == CHUNKED:
        return known_pattern(CHUNKED, config.attention_chunk_size)
    if kind != WINDOWED:
        return known_pattern(FULL)
    # masks of encoders have |i - j| <= sliding_window, that of EmbeddingGemma has <
    inclusive = not getattr(module, "is_causal", True) and not getattr(config, "use_bidirectional_attention", False)
    return known_pattern(WINDOWED, config.sliding_window + inclusive)


def has_windows(config: Any) -> bool:
    types = getattr(config, "layer_types", None)
    return WINDOWED in types or CHUNKED in types if types else getattr(config, "sliding_window", None) is not None


def is_of_windows(pattern: Pattern, reach: int) -> bool:
    """True if a row sees at most itself and the `reach` tokens before it, wherever it is in the sequence."""
    return all(isinstance(branch, SlidingWindow) and branch.reach <= reach for branch in pattern.branches)


def kind_of(module: Any) -> str:
    """Return transformers' name for the attention of a layer. Raises ValueError for one that several layers share (Zamba)."""
    config, types = module.config, getattr(module.config, "layer_types", None)
    if types:
        if (number := getattr(module, "layer_idx", None)) is None:
            raise ValueError(
                f"{type(module).__name__} has no number (layer_idx) by which layer_types of the configuration say its kind; "
                "register the pattern, and make or load the model with attn_implementation='dilkit'"
            )
        return str(types[number])
    return FULL if getattr(config, "sliding_window", None) is None else WINDOWED


def known_pattern(kind: str, size: int = 0) -> Pattern:
    """Return the pattern of a `kind` of `LAYER_TYPES`: windows of |i - j| < `size`, chunks of `size` tokens, or all."""
    pattern = _KNOWN[_known_kind(kind, size)]
    assert isinstance(pattern, Pattern)
    return pattern


@assume_constant_result
def _known_kind(kind: str, size: int) -> str:
    key = f"{kind} {size}"
    if key not in _KNOWN:
        _KNOWN[key] = DENSE if kind == FULL else Pattern([size], [1]) if kind == CHUNKED else Pattern.mistral(size)
    return key


@assume_constant_result
def _known_as(stated: Any) -> str:
    """Return the key of the patterns of `config.dilkit` in `_KNOWN`. torch.compile can keep a text, but not a pattern."""
    if isinstance(stated, Pattern):
        raise TypeError(
            "config.dilkit is a Pattern, which cannot be saved in a configuration; json.loads(pattern.to_json()) is needed"
        )
    key = json.dumps(stated)
    if key not in _KNOWN:
        _KNOWN[key] = tuple(map(_from_json, stated)) if isinstance(stated, (list, tuple)) else _from_json(stated)
    return key


def _from_json(value: Any) -> Any:
    return None if value is None else Pattern.from_json(value if isinstance(value, str) else json.dumps(value))
