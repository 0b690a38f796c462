"""Checks of a layer's call: refusals of all that dilated attention does not compute, with the reason and a way out."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dilkit.compiler import assume_constant_result
from dilkit.integrations.transformers.biases.tables import PositionBias
from dilkit.integrations.transformers.context.attention import KEPT_AS
from dilkit.integrations.transformers.mask_intervals import of_tensor
from dilkit.integrations.transformers.patterns import DENSE, LAYER_TYPES
from dilkit.integrations.transformers.sequences import KEPT_BY, TokenMask
from dilkit.pattern import Pattern, SlidingWindow

TAKEN = ("flash", "sdpa", "flex", "eager", "paged", "/", "|")
"""Parts of a name by which transformers takes another way."""
KNOWN = (
    *("query", "key", "value", "attention_mask", "scaling", "dropout", "is_causal", "s_aux", "sliding_window", "softcap"),
    *("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "deterministic"),
    *("position_bias", "output_attentions"),
)

_PARSING = threading.Lock()
"""Held while source is parsed: Python 3.11 counts the depth of two trees that threads build as one, and raises SystemError."""


def check_options(module: Any, options: dict[str, Any], key: Tensor) -> None:
    """Raise ValueError for arguments that ask for another attention, or for one that the holder of the keys does not compute."""
    in_cache, over_ranks = getattr(key, KEPT_BY, None) is not None, getattr(module, KEPT_AS, None) is not None
    if in_cache and over_ranks:
        raise ValueError(
            f"{type(module).__name__} under context_parallel with a dilated_cache(), which has no rows of other ranks; generate "
            "with a model that context_parallel was not called on"
        )
    if (bias := options.get("position_bias")) is not None and not isinstance(bias, PositionBias):
        raise ValueError(
            f"position_bias={_short(bias)} of {type(module).__name__}: a tensor of all pairs is not read; T5's tables are, for "
            "others take the attention 'eager'"
        )
    for name in _unknown_arguments(type(module)):
        if options.get(name) is not None:
            raise ValueError(
                f"{name}={_short(options[name])} of {type(module).__name__} is an argument that dilkit does not know; take the "
                "attention 'eager'"
            )


def holder_of(module: Any, key: Tensor, options: dict[str, Any]) -> str:
    """Return the name of what holds rows that a call sees, but does not get; "" where it gets all."""
    holders = {"a dilated_cache()": getattr(key, KEPT_BY, None), "context_parallel": getattr(module, KEPT_AS, None)}
    holders |= {"continuous batching": options.get("cache")}
    return next((name for name, holder in holders.items() if holder is not None), "")


def wants_weights(module: Any, options: dict[str, Any], dropout: float = 0.0, refused: str = "") -> bool:
    """True if a call asks for its weights. Raises ValueError with dropout, and for what else they are `refused`."""
    if not (options.get("output_attentions") or _records_attentions()):
        return False
    if refused := refused or ("dropout" if dropout > 0 else "torch.compile" if torch.compiler.is_compiling() else ""):
        raise ValueError(
            f"output_attentions=True of {type(module).__name__} with {refused}: there is no matrix of weights; take the "
            "attention 'eager', or dilkit.attention_rows"
        )
    return True


@assume_constant_result
def _records_attentions() -> bool:
    """Return True in a call whose model records weights by itself: the layers of GPT-2 and OPT are not told."""
    from transformers.utils import output_capturing

    collector: Any = output_capturing._active_collector
    return bool({"attentions", "cross_attentions"} & {*(collector.get() or ())})


@assume_constant_result
def _unknown_arguments(kind: Any) -> tuple[str, ...]:
    return _unknown(kind)


@cache
def _unknown(kind: Any) -> tuple[str, ...]:
    with _PARSING:
        tree = ast.parse(textwrap.dedent(source_of(kind.forward)))
    calls = (x for x in ast.walk(tree) if isinstance(x, ast.Call) and getattr(x.func, "id", None) == "attention_interface")
    return tuple(word.arg for call in calls for word in call.keywords if word.arg is not None and word.arg not in KNOWN)


def _short(value: object) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


@cache
def arguments_of(kind: Any) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)


@cache
def source_of(code: Any) -> str:
    """Return the source of a function or module; "" where there is none, as in a notebook."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return ""


def class_tables(kind: Any) -> dict[str, dict[str, Any]]:
    """Return the tables in the module of `kind` from which its models take a class of layers by the name of the attention."""
    homes = {base.__module__ for base in kind.__mro__ if base.__module__.startswith("transformers.models.")}
    tables = (table for home in homes for table in vars(sys.modules[home]).items())
    return {name: x for name, x in tables if name.endswith("_ATTENTION_CLASSES") and isinstance(x, dict)}


def checked_mask(mask: object, module: Any, query: Tensor, key: Tensor, takes_pairs: bool = False) -> TokenMask | None:
    """Return `mask`. Raises ValueError unless it fits these queries and keys, `(batch, heads, rows, head_dim)`.

    `takes_pairs`: masks of pairs fit, too, and a tensor of all of them is read.
    """
    if mask is None:
        return None
    if takes_pairs and isinstance(mask, Tensor):
        rows, keys = query.shape[2], key.shape[2]
        return TokenMask(False, rows, keys, intervals=of_tensor(mask, type(module).__name__, rows, keys))
    if not isinstance(mask, TokenMask) or (mask.intervals is not None and not takes_pairs):
        what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__} of pairs"
        raise ValueError(
            f"attention_mask of {type(module).__name__} is {what}; a mask (batch, seen) of the tokens, handed to the model, is "
            "needed: the pattern defines which keys a query sees"
        )
    rows, keys = query.shape[2], key.shape[2]
    if mask.rows != rows or (mask.keys != keys and getattr(key, KEPT_BY, None) is None):
        what = f"{type(module).__name__} has {rows} rows and {keys} keys, but its mask is for {mask.rows} and {mask.keys}"
        types, number = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
        if types and number is not None and types[number] not in LAYER_TYPES:
            raise ValueError(f"{what}: layer {number} has {types[number]}; convert(model) lets it keep its own attention")
        raise ValueError(f"{what}: dilated attention needs all rows of a sequence, or the last of them with all keys")
    if mask.tokens is not None and mask.tokens.shape[0] != query.shape[0]:
        raise ValueError(f"attention_mask has {mask.tokens.shape[0]} sequences, and {type(module).__name__} {query.shape[0]}")
    return mask


def check_decoding(causal: bool, mask: TokenMask | None, dropout: float, options: dict[str, Any]) -> None:
    if options.get("cu_seq_lens_q") is not None:
        raise ValueError("cu_seq_lens_q with a dilated_cache(); packed sequences have no cache (use_cache=False)")
    if mask is not None and (mask.tokens is not None or mask.packing is not None):
        raise ValueError(
            "attention_mask has padding, but all sequences of a dilated_cache() have the same length; give a DynamicCache, or "
            "each sequence by itself"
        )
    if not causal or dropout > 0:
        raise ValueError("a dilated_cache() is for decoding: causal, without dropout; give model.eval()")


def check_shown(
    module: Any, query: Tensor, key: Tensor, pattern: Pattern, stated: object, mask: TokenMask | None, options: dict[str, Any]
) -> None:
    """Raise ValueError where the mask says otherwise than the layer's own pattern, or is of pairs and not all there is."""
    if mask is None or mask.intervals is None:
        if stated is None:
            check_own(module, pattern, mask, options)
        return
    holder = holder_of(module, key, options)
    bias: PositionBias | None = options.get("position_bias")
    by_place = bias is None or (bias.counts_padding and query.shape[2] == key.shape[2])
    others = {
        f"the pattern {pattern}, which is to say it": stated is not None and pattern != DENSE,
        holder: holder,
        "a position bias that does not go by places, or a cache": not by_place,
        "cu_seq_lens_q": options.get("cu_seq_lens_q") is not None,
    }
    if beside := next((name for name, there in others.items() if there), None):
        raise ValueError(
            f"{type(module).__name__} has a mask of pairs, beside {beside}; leave one of both, or take the attention 'sdpa'"
        )


def check_continuous(module: Any, sequences: int, causal: bool, dropout: float, options: dict[str, Any]) -> None:
    kind = type(module).__name__
    if sequences != 1:
        raise ValueError(f"{kind} in continuous batching has a batch of {sequences}; the rows of all sequences as one are needed")
    if not causal or dropout > 0:
        raise ValueError(f"{kind} in continuous batching must be causal and without dropout; call model.eval()")
    if getattr(module, KEPT_AS, None) is not None:
        raise ValueError(f"{kind} in continuous batching and context_parallel exclude each other; use one of them")
    if isinstance(options.get("position_bias"), PositionBias):
        raise ValueError(f"position_bias of {kind} in continuous batching, which adds none; take generate")
    if options.get("block_table") is not None:
        raise ValueError(f"block_table of {kind}, which is not read; give ContinuousBatchingConfig(max_blocks_per_request=0)")


def check_own(module: Any, pattern: Pattern, mask: TokenMask | None, options: dict[str, Any]) -> None:
    """Raise ValueError where transformers computes another pattern than `own_pattern` of the layer."""
    kind = type(module).__name__
    if mask is not None and mask.shows is not None:
        if mask.shows != pattern.to_json():
            shown = Pattern.from_json(mask.shows)
            raise ValueError(
                f"{kind} has {pattern} by its configuration, but the mask of its model shows {shown}; give the pattern of "
                "each layer, by register or convert"
            )
        return
    window = next((branch.window for branch in pattern.branches if isinstance(branch, SlidingWindow)), None)
    if window is not None and "sliding_window" not in options:
        raise ValueError(
            f"sliding_window={window} is in the configuration, but {kind} passes none on: a Llama ignores it, "
            f"other models have it in their masks; give register or convert Pattern.mistral({window}) or Pattern.dense()"
        )
    if options.get("sliding_window", window) != window:
        raise ValueError(
            f"sliding_window={options['sliding_window']} of {kind}, but by the configuration it is {window} in "
            f"layer {module.layer_idx}; give the pattern of each layer, register([...])"
        )
