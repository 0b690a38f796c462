"""T5's position bias: what its layers hand on in place of a tensor of all pairs.

first layer     makes `(1, heads, rows, keys)` of its table of buckets      here: a `LayerBias` with that layer
later layers    get what the first one made                                 the same `LayerBias`
attention       adds it to the scores                                       `dilkit.RelativeTable` of the layer's table
cross-attention makes zeros                                                 a `LayerBias` of no layer

T5, mT5 and Pop2Piano have such layers.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilkit.bias.tables import RelativeTable
from dilkit.integrations.transformers.token_mask import TokenMask

MADE_BY = ("compute_bias", "_relative_position_bucket")
"""The methods of a layer with a table of buckets."""
HANDED_ON = {"mask", "key_value_states", "position_bias"}
"""What such a layer's `forward` takes, beside its input."""


@dataclass(frozen=True, eq=False)
class LayerBias:
    """The position bias of a model's self-attention, from the table of `layer`; None: cross-attention, which has none."""

    layer: Any = None

    @property
    def value(self) -> RelativeTable | None:
        """The bias as dilkit takes it; its gradient reaches the table.

        The layer's own method says what each distance gets: one row in the midst of as many keys as differ. Each call asks it
        anew, so that gradient checkpointing, which runs layers twice, finds a graph of its own.
        """
        if self.layer is None:
            return None
        most = self.layer.relative_attention_max_distance
        of_keys = self.layer.compute_bias(1, 2 * most + 1, past_seen_tokens=most)
        return RelativeTable(of_keys[0, :, 0].flip(-1))


def watch_biases(model: Any) -> None:
    """Have the layers of a class of models hand on a `LayerBias` where dilkit computes their attention; once is enough."""
    for kind in _layers(model):
        if getattr(kind.forward, "watched_by", None) != __name__:
            kind.forward = _watched(kind.forward)


def _layers(model: Any) -> Iterator[Any]:
    """The classes of layers with T5's bias that stand beside `model`, or beside a class that it is derived from."""
    for home in {kind.__module__ for kind in model.__mro__ if kind.__module__.startswith("transformers.models.")}:
        yield from (kind for kind in vars(sys.modules[home]).values() if isinstance(kind, type) and _has_table(kind))


def _has_table(kind: Any) -> bool:
    return all(hasattr(kind, name) for name in MADE_BY) and set(inspect.signature(kind.forward).parameters) >= HANDED_ON


def _watched(forward: Any) -> Any:
    @functools.wraps(forward)
    def watched(layer: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        mask = args[0] if args else options.get("mask")
        if isinstance(mask, TokenMask) and len(args) < 3 and options.get("position_bias") is None:
            across = (args[1] if len(args) > 1 else options.get("key_value_states")) is not None
            if across or layer.has_relative_attention_bias:
                options["position_bias"] = LayerBias(None if across else layer)
        return forward(layer, hidden_states, *args, **options)

    watched.watched_by = __name__  # type: ignore[attr-defined]
    return watched


def is_of_layer(bias: object) -> bool:
    """Whether a position bias is known: that of a layer with a table, or none of cross-attention."""
    return isinstance(bias, LayerBias)


def check_runs(tokens: Tensor, kind: str) -> None:
    """Raise ValueError where tokens, bool `(batch, seen)`, have padding between them: the bias is by place, padding included."""
    runs = tokens[:, 0].int() + (tokens.int().diff(dim=1) == 1).sum(1)
    if torch.compiler.is_compiling():
        torch._assert_async((runs <= 1).all(), f"attention_mask of {kind} has padding between tokens, and a position bias")
    elif bool((runs > 1).any()):
        raise ValueError(
            f"attention_mask of {kind} has padding between tokens, but distances of its position bias count padding, and dilkit "
            "leaves it out; put padding before or after the tokens"
        )
