"""Cross-attention: layers whose keys are of another sequence. Each row sees all of its tokens, whatever the pattern.

A layer may attend to its own sequence in one call and to another in the next, and hands on nothing that shows which. So the
`forward` of such classes is wrapped to say so.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any, cast

from torch import Tensor

from dilkit.attention import dilated_attention
from dilkit.compiler import assume_constant_result
from dilkit.integrations.transformers.checks import (
    TAKEN,
    arguments_of,
    check_options,
    checked_mask,
    holder_of,
    source_of,
    wants_weights,
)
from dilkit.integrations.transformers.patterns import DENSE
from dilkit.integrations.transformers.sequences import ACROSS, TokenMask
from dilkit.integrations.transformers.weights import rows_of_weights

OTHER_STATES = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "context")
"""Arguments of a layer that, where they are given, its keys are made of."""
SEPARATE = ({"query", "key", "value"}, {"queries", "keys", "values"})
"""Arguments of layers that get their queries and keys one by one."""


def watch_layers(model: Any) -> None:
    """Have the layers of a class of models say when they attend to another sequence; once is enough."""
    for home in {kind.__module__ for kind in model.__mro__ if hasattr(kind, "get_correct_attn_implementation")}:
        for layer in [x for x in vars(sys.modules[home]).values() if isinstance(x, type)] if home in sys.modules else ():
            if _takes_other_states(layer) and not _is_watched(layer.forward):  # type: ignore[attr-defined]
                layer.forward = _watched(layer.forward)  # type: ignore[attr-defined]


def is_across(module: Any, options: dict[str, Any]) -> bool:
    """True if the keys of a call are of another sequence. Raises ValueError for a layer of which that is not known."""
    said, kind = options.pop(ACROSS, None), type(module)
    if not said and (getattr(module, "is_cross_attention", False) or (said is None and _takes_other_states(kind))):
        raise ValueError(
            f"{kind.__name__} may be cross-attention, of two sequences, and does not say so; make, load or convert its model by "
            "dilkit's name, before hooks replace its forward, or take the attention 'eager'"
        )
    return bool(said)


def attend_across(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: TokenMask | None,
    dropout: float,
    scaling: float | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Attend to all tokens of another sequence. Raises ValueError for causality, sinks, and keys that others hold."""
    if holder := holder_of(module, key, options):
        raise ValueError(
            f"{type(module).__name__} is cross-attention, which {holder} does not compute; take one rank, and a DynamicCache for "
            "it: EncoderDecoderCache(dilated_cache(), DynamicCache())"
        )
    check_options(module, options, key)
    checked = checked_mask(mask, module, query, key)
    if options.get("is_causal") or options.get("s_aux") is not None or (checked is not None and checked.causal):
        raise ValueError(f"{type(module).__name__} is cross-attention, which is computed neither causally nor with sinks (s_aux)")
    padding = None if checked is None or checked.tokens is None else ~checked.tokens
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    call: dict[str, Any] = dict(scale=scaling, softcap=options.get("softcap"))
    weights = rows_of_weights(q, k, DENSE, padding, 0, **call) if wants_weights(module, options, dropout) else None
    return cast(Tensor, dilated_attention(q, k, v, DENSE, key_padding_mask=padding, dropout_p=dropout, **call)), weights


def _watched(forward: Any) -> Any:
    parameters = inspect.signature(forward).parameters
    names = list(parameters)
    places = {name: names.index(name) - 1 for name in OTHER_STATES if name in names}
    may_tell = places or any(separate <= set(names) for separate in SEPARATE)
    if not may_tell or all(x.kind is not x.VAR_KEYWORD for x in parameters.values()):
        return forward  # a patch that hides its arguments, or a layer that hands nothing on: a call is refused

    @functools.wraps(forward)
    def watched(layer: Any, *args: Any, **options: Any) -> Any:
        # queries and keys that come one by one, or keys that may come from a cache alone
        across = not places or "Cross" in type(layer).__name__
        for name, place in places.items():
            across = across or options.get(name) is not None or (place < len(args) and args[place] is not None)
        if not any(part in (layer.config._attn_implementation or "eager") for part in TAKEN):  # also what calls ours
            options[ACROSS] = across
        return forward(layer, *args, **options)

    watched.says_across = True  # type: ignore[attr-defined]
    return watched


def _is_watched(forward: Any) -> bool:
    while forward is not None and not hasattr(forward, "says_across"):
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None


@assume_constant_result
def _takes_other_states(kind: Any) -> bool:
    return _may_attend_across(kind)


@functools.cache
def _may_attend_across(kind: Any) -> bool:
    """True if a class calls an attention function, by its name, with arguments of its own for the keys."""
    forward = getattr(kind, "forward", None)
    if forward is None or "attention_interface(" not in source_of(forward):
        return False
    names = arguments_of(kind)
    return not names.isdisjoint(OTHER_STATES) or any(separate <= names for separate in SEPARATE)
