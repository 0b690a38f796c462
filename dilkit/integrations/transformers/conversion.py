"""`convert`: dilated attention in the layers of a model that is there, with its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dilkit.integrations.transformers.biases.local import local_layers
from dilkit.integrations.transformers.biases.tables import has_table
from dilkit.integrations.transformers.checks import source_of
from dilkit.integrations.transformers.kept_layers import KEEPS, attention_of_class, keep
from dilkit.integrations.transformers.patterns import (
    DENSE,
    LAYER_TYPES,
    Patterns,
    checked,
    has_windows,
    kind_of,
    pattern_of_layer,
    stated_patterns,
    to_config,
)
from dilkit.integrations.transformers.registration import check_proven, classes_with, is_registered, patterns_registered, register
from dilkit.pattern import Pattern

LOOKED_UP = "ALL_ATTENTION_FUNCTIONS.get_interface("


@dataclass(frozen=True)
class ConvertedLayer:
    """One attention layer: where it is in the model, its class, what it computed before, and the pattern that it has now.

    >>> from dilkit import Pattern
    >>> from dilkit.integrations.transformers import ConvertedLayer
    >>> print(ConvertedLayer("model.layers.0.self_attn", "LlamaAttention", "sdpa", Pattern([2048], [1])))
    model.layers.0.self_attn (LlamaAttention): sdpa -> Pattern([2048], [1])
    """

    path: str
    kind: str
    before: str
    pattern: Pattern

    def __str__(self) -> str:
        return f"{self.path} ({self.kind}): {self.before} -> {self.pattern}"


@dataclass(frozen=True)
class Conversion:
    """The layers that `convert` changed, and the paths of those that keep their own attention; `print` shows a line for each.

    >>> from dilkit.integrations.transformers import Conversion
    >>> print(Conversion(layers=()))
    0 attention layers
    """

    layers: tuple[ConvertedLayer, ...]
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        kept = (f"{path}: stays as it is" for path in self.kept)
        return "\n".join([f"{len(self.layers)} attention layers", *map(str, self.layers), *kept])


def convert(model: Any, pattern: Pattern | str | Sequence[Pattern | str] | None = None, name: str = "dilkit") -> Conversion:
    """Let every attention layer of `model`, of transformers, compute dilated attention from now on; its weights stay as they are.

    - `pattern`: a `dilkit.Pattern` for all layers, those of images and sounds among them, or a list with one for each, or a text
      as in `register`. It is written into the configuration, `config.dilkit`, and saved with the model, `name` too: to be loaded
      again it needs `register()` and nothing else. None: what the configuration says, as in `register`, or else what each layer
      computed before; beside windows, parts without, such as one for images, stay as they are.
    - `name`: as in `register`, which is called with it, unless it is registered; other models of that name stay as they are.
      Only models that were made of the same configuration object, which transformers does not copy, are switched too: make
      each of a `copy.deepcopy` of it.

    Returns what changed by layer, and what did not: cross-attention sees all tokens of the other sequence, whatever the pattern;
    layers of another kind, such as those that choose their keys, and those of a part without windows keep their own attention. A
    model with the former, loaded again, has to be converted again. Where dilated attention sees less than the model was trained
    with, its results differ: train it further. Raises TypeError or ValueError, with the reason, for a model of such layers
    alone, one that does not look its attention up, or one that is wrong with a version of transformers that is not tested; it is
    then as it was.

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from dilkit import Pattern
        >>> from dilkit.integrations.transformers import convert
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
        >>> print(convert(model, Pattern([16, 64], [1, 4])))
        2 attention layers
        model.layers.0.self_attn (LlamaAttention): sdpa -> Pattern([16, 64], [1, 4])
        model.layers.1.self_attn (LlamaAttention): sdpa -> Pattern([16, 64], [1, 4])
    """
    wanted = None if pattern is None else checked(pattern)
    everywhere = layers = attention_layers(model)
    if wanted is None:
        stating = (path for path, x in everywhere.items() if stated_patterns(None, x.config) is not None or has_windows(x.config))
        layers = {path: everywhere[path] for path in stating} or everywhere
    _check(layers, wanted)
    unknown = {path: x for path, x in layers.items() if kind_of(x) not in LAYER_TYPES}
    layers = {path: x for path, x in layers.items() if path not in unknown}
    stated = {id(x.config): stated_patterns(None, x.config) if wanted is None else wanted for x in layers.values()}
    registered = patterns_registered(name)
    if None in stated.values() and registered is not None:
        raise ValueError(
            f"name={name!r} is registered with {registered}, which other models may compute; give a pattern, or another name"
        )
    changed = [
        ConvertedLayer(
            path,
            type(x).__name__,
            str(x.config._attn_implementation),
            DENSE if _is_named_across(path, x) else pattern_of_layer(stated[id(x.config)], x),
        )
        for path, x in layers.items()
    ]
    parts, alone = [model], computing(model)
    by_class = [layer for layer in alone.values() if attention_of_class(layer)]
    if by_class or len(layers) + len(unknown) != len(everywhere):  # the models within it, such as those of texts
        parts = [x for x in model.modules() if hasattr(x, "set_attn_implementation") and id(x.config) in stated]
    for kind in [kind for part in parts for kind in classes_with(part, layers.values())]:
        check_proven(kind)
    if not is_registered(name):
        register(None, name)
    if wanted is not None:
        holders = [*layers.values(), *([] if by_class else [model])]  # whose layers by class would get dilated masks
        for config in {id(x.config): x.config for x in holders}.values():
            config.dilkit = to_config(_without(unknown, config, wanted))
    for layer in (*unknown.values(), *by_class):
        keep(layer, model)
    for part in parts:
        part.set_attn_implementation(name)
    return Conversion(tuple(changed), tuple(path for path in (*everywhere, *alone) if path not in layers))


def _is_named_across(path: str, layer: Any) -> bool:
    name = f"{path.rpartition('.')[2]} {type(layer).__name__}".lower()
    return bool(getattr(layer, "is_cross_attention", False)) or any(word in name for word in ("cross", "encoder_attn", "encdec"))


def looked_up(model: Any) -> dict[str, Any]:
    """Return the layers that look their attention up by name, by their paths. Raises TypeError for no model of transformers."""
    if not hasattr(model, "set_attn_implementation"):
        raise TypeError(f"model is a {type(model).__name__}; a model of transformers is needed, such as LlamaForCausalLM")
    asking = {path: x for path, x in model.named_modules() if hasattr(x, "config") and LOOKED_UP in source_of(type(x).forward)}
    return local_layers(model) | asking


def computing(model: Any) -> dict[str, Any]:
    """Return the layers that compute attention by themselves: LongT5's transient-global ones, and those of a table of classes."""
    return {path: x for path, x in model.named_modules() if has_table(x) or attention_of_class(x)}


def attention_layers(model: Any) -> dict[str, Any]:
    layers = looked_up(model)
    if not layers or not model._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} has no attention that it looks up by name (attn_implementation). After register(pattern), "
            "Bloom and MPT are made or loaded with attn_implementation='dilkit'; convert_relative(model) takes SAM's vision "
            "encoder, Parakeet, Wav2Vec2-BERT, Wav2Vec2-Conformer and SeamlessM4T"
        )
    return layers


def _without(unknown: dict[str, Any], config: Any, wanted: Patterns) -> Patterns:
    """Return the patterns for a configuration: None for those of its layers that keep their `own` attention."""
    numbers = {x.layer_idx for x in unknown.values() if getattr(x, KEEPS, (None, x.config))[1] is config}
    if not numbers:
        return wanted
    patterns = wanted if isinstance(wanted, tuple) else (wanted,) * len(config.layer_types)
    return tuple(None if layer in numbers else pattern for layer, pattern in enumerate(patterns))


def _check(layers: dict[str, Any], given: Patterns | None) -> None:
    kinds = {path: kind_of(x) for path, x in layers.items()}
    if not set(LAYER_TYPES).intersection(kinds.values()):
        path, kind = next(iter(kinds.items()))
        raise ValueError(
            f"{path} has {kind}, and no layer has {', '.join(LAYER_TYPES)}, which dilated attention takes the place of; set "
            "layer_types of the configuration, and make the model anew"
        )
    for path, x in layers.items():
        if isinstance(given, tuple) and getattr(x, "layer_idx", None) is None:
            raise ValueError(
                f"pattern is a list, and {path} ({type(x).__name__}) has no number by which one is its own (layer_idx); give one "
                "pattern for all, or convert a part of the model, such as model.language_model"
            )
    if isinstance(given, tuple) and len(given) != (count := len({x.layer_idx for x in layers.values()})):
        raise ValueError(f"pattern is a list of {len(given)}, and the model has {count} attention layers; give one for each")
