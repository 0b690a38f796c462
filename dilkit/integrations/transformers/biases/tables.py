"""T5's position bias, of a table of buckets; mT5 and Pop2Piano have such layers too.

first layer        makes `(1, heads, rows, keys)` of its table    here: a `PositionBias` of its table
later layers       get what the first one made                    the same `PositionBias`
attention          adds it to the scores                          `dilkit.RelativeTable`
cross-attention    makes zeros                                    a `PositionBias` of nothing
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.bias.tables import RelativeTable
from dilkit.integrations.transformers.sequences import TokenMask

MADE_BY = ("compute_bias", "_relative_position_bucket")
HANDED_ON = {"mask", "key_value_states", "position_bias"}


@dataclass(frozen=True, eq=False)
class PositionBias:
    """The bias of a call, made anew by `make` for each layer, or None in cross-attention.

    `counts_padding`: its distances count padding between tokens.
    """

    make: Callable[[], Bias] | None
    counts_padding: bool = True

    def on(self, device: torch.device) -> Bias | None:
        """Make the bias on `device`, that of a layer."""
        if self.make is None:
            return None
        bias = self.make()
        return bias.with_weights(bias.weights.to(device))


def watch_tables(model: Any) -> None:
    """Have the layers of a class of models hand on a `PositionBias` where dilkit computes their attention; once is enough."""
    for home in {kind.__module__ for kind in model.__mro__ if kind.__module__.startswith("transformers.models.")}:
        classes: list[Any] = [x for x in vars(sys.modules[home]).values() if isinstance(x, type)]
        for layer in classes:
            has_table = all(hasattr(layer, name) for name in MADE_BY)
            has_table = has_table and set(inspect.signature(layer.forward).parameters) >= HANDED_ON
            if has_table and getattr(layer.forward, "watched_by", None) != __name__:
                layer.forward = _watched(layer.forward)


def table_of(layer: Any, device: torch.device | str = "cpu") -> RelativeTable:
    """Return the bias of a layer, with gradients, by its own method: one row in the midst of as many keys as differ."""
    most = layer.relative_attention_max_distance
    of_keys = layer.compute_bias(1, 2 * most + 1, device=device, past_seen_tokens=most)
    return RelativeTable(of_keys[0, :, 0].flip(-1))


class _FirstTable:
    """The bias of the first layer, also for later ones, which may not reach its weights: FSDP has them gathered then.

    Reentrant checkpoints compute it without a graph and later layers with one: these make it anew.
    """

    def __init__(self, layer: Any, device: torch.device) -> None:
        self._layer, self._bias = layer, table_of(layer, device)

    def __call__(self) -> RelativeTable:
        learned = any(weight.requires_grad for weight in self._layer.relative_attention_bias.parameters())
        wanted = torch.is_grad_enabled() and learned
        return table_of(self._layer, self._bias.table.device) if wanted and not self._bias.table.requires_grad else self._bias


def _watched(forward: Any) -> Any:
    @functools.wraps(forward)
    def watched(layer: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        mask = args[0] if args else options.get("mask")
        if isinstance(mask, TokenMask) and len(args) < 3 and options.get("position_bias") is None:
            across = (args[1] if len(args) > 1 else options.get("key_value_states")) is not None
            if across or layer.has_relative_attention_bias:
                options["position_bias"] = PositionBias(None if across else _FirstTable(layer, hidden_states.device))
        return forward(layer, hidden_states, *args, **options)

    watched.watched_by = __name__  # type: ignore[attr-defined]
    return watched
