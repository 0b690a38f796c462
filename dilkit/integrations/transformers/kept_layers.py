"""Layers of a converted model that keep their own attention: they get a configuration and masks of that attention."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from dilkit.integrations.transformers.checks import class_tables
from dilkit.integrations.transformers.registration import is_registered
from dilkit.integrations.transformers.sequences import TokenMask

KEEPS = "dilkit_keeps"
"""The attribute of a layer that is the name of the attention which it keeps, and its model's configuration, if that says it."""


def keep(layer: Any, model: Any) -> None:
    """Have a layer of `model` keep the attention that it has now, whatever its model gets; once is enough.

    One that has ours, as in a model that was loaded again, gets what transformers gives it by default.
    """
    if hasattr(layer, KEEPS):
        return
    layer.register_forward_pre_hook(_with_own_masks, with_kwargs=True)
    if name := attention_of_class(layer):
        setattr(layer, KEEPS, (name, None))
        return
    shared, copied = layer.config, copy.copy(layer.config)
    if is_registered(copied._attn_implementation):
        holders = [x for x in model.modules() if getattr(x, "config", None) is shared and hasattr(x, "_supports_sdpa")]
        copied._attn_implementation = "sdpa" if holders and all(x._supports_sdpa for x in holders) else "eager"
    for part in layer.modules():
        if getattr(part, "config", None) is shared:
            part.config = copied
    setattr(layer, KEEPS, (copied._attn_implementation, shared))


def attention_of_class(layer: Any) -> str:
    """Return the name by which transformers takes the class of a layer from a table; "" if it does not."""
    named = (item for classes in class_tables(type(layer)).values() for item in classes.items())
    return next((name for name, kind in named if kind is type(layer)), "")


def _with_own_masks(layer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if options.get("read_index") is not None:
        raise ValueError(
            f"{type(layer).__name__} in continuous batching keeps its own attention, which does not read the pool; take generate"
        )
    own_mask = partial(_own_mask, type(layer).__name__, getattr(layer, KEEPS)[0])
    return tuple(map(own_mask, args)), {name: own_mask(x) for name, x in options.items()}


def _own_mask(kind: str, attention: str, x: Any) -> Any:
    if not isinstance(x, TokenMask):
        return x
    if x.make is None:
        raise ValueError(
            f"{kind} keeps the attention {attention!r}, but its mask is not known under torch.compile; compile a model without it"
        )
    return x.make(attention)
