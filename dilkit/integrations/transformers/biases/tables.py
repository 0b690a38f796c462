"""T5's position bias, of a table of buckets; mT5, UMT5, Switch Transformers, LongT5 and Pop2Piano have such layers too.

first layer        makes `(1, heads, rows, keys)` of its table    here: a `PositionBias` of its table
later layers       get what the first one made                    the same `PositionBias`
        of UMT5    have tables of their own                       each its own, by the code of T5's layer
attention          adds it to the scores                          `dilkit.RelativeTable`
cross-attention    makes zeros                                    a `PositionBias` of nothing
encoder of Switch  makes a mask (batch, 1, 1, keys) by itself     a `TokenMask`
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.bias.tables import RelativeTable
from dilkit.integrations.transformers.mask_intervals import hiding
from dilkit.integrations.transformers.sequences import ACROSS, TokenMask, of_tokens

MADE_BY = ("compute_bias", "_relative_position_bucket")
HANDED_ON = ["mask", "key_value_states", "position_bias"]
BY_LAYER = {"attention_mask", "encoder_hidden_states"}
"""Arguments of layers that have a table each, as UMT5's."""
T5 = "transformers.models.t5.modeling_t5"


@dataclass(frozen=True, eq=False)
class PositionBias:
    """The bias of a call, made again by `make` for each layer, or None in cross-attention.

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


def watch_tables(model: Any, is_ours: Callable[[object], bool]) -> None:
    """Have the layers of a class of models hand on a `PositionBias` where `is_ours(name)`; once is enough."""
    for home in {kind.__module__ for kind in model.__mro__ if kind.__module__.startswith("transformers.models.")}:
        classes: list[Any] = [x for x in vars(sys.modules[home]).values() if isinstance(x, type)]
        for layer in filter(has_table, classes):
            names = list(inspect.signature(layer.forward).parameters)
            asking: Any = _with_first_table if names[2:5] == HANDED_ON else None
            if set(names) >= BY_LAYER:
                asking = functools.partial(_with_own_table, importlib.import_module(T5).T5Attention)
            if asking is not None and getattr(layer.forward, "watched_by", None) != __name__:
                layer.forward = _watched(layer.forward, asking, is_ours)


def has_table(layer: Any) -> bool:
    """True for a layer, or a class of layers, whose only positions may be those of a table such as T5's."""
    return all(hasattr(layer, name) for name in MADE_BY)


def table_of(layer: Any, device: torch.device | str = "cpu") -> RelativeTable:
    """Return the bias of a layer, with gradients, by its own method: one row in the midst of as many keys as differ."""
    most = layer.relative_attention_max_distance
    if hasattr(layer, "block_len"):  # of LongT5: a block of most + 1 rows, whose keys begin as many before it
        of_keys = layer.compute_bias(most + 1)[0, 0, :, 0, 1 : 2 * most + 2].to(device)
    else:
        of_keys = layer.compute_bias(1, 2 * most + 1, device=device, past_seen_tokens=most)[0, :, 0]
    return RelativeTable(of_keys.flip(-1))


class FirstTable:
    """The bias of a layer, also for later ones, which may not reach its weights: FSDP has them gathered then.

    Reentrant checkpoints compute it without a graph and later layers with one: these make it again.
    """

    def __init__(self, layer: Any, device: torch.device) -> None:
        self._layer, self._bias = layer, table_of(layer, device)

    def __call__(self) -> RelativeTable:
        learned = any(weight.requires_grad for weight in self._layer.relative_attention_bias.parameters())
        wanted = torch.is_grad_enabled() and learned
        return table_of(self._layer, self._bias.table.device) if wanted and not self._bias.table.requires_grad else self._bias


def _watched(forward: Any, asking: Any, is_ours: Callable[[object], bool]) -> Any:
    @functools.wraps(forward)
    def watched(layer: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        masks = (*args, options.get("mask"), options.get("attention_mask"))
        asks = any(isinstance(x, TokenMask) for x in masks) or is_ours(layer.config._attn_implementation)
        return (
            asking(forward, layer, hidden_states, *args, **options) if asks else forward(layer, hidden_states, *args, **options)
        )

    watched.watched_by = __name__  # type: ignore[attr-defined]
    return watched


def _with_first_table(
    forward: Any,
    layer: Any,
    hidden_states: Tensor,
    mask: Any = None,
    key_value_states: Tensor | None = None,
    position_bias: Any = None,
    *args: Any,
    **options: Any,
) -> Any:
    across = key_value_states is not None
    if position_bias is None and (across or layer.has_relative_attention_bias):
        position_bias = PositionBias(None if across else FirstTable(layer, hidden_states.device))
    rows = hidden_states.shape[1]
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1:3] == (1, 1) and (across or mask.shape[3] == rows):
        mask = _of_padding(mask, rows)
    return forward(layer, hidden_states, mask, key_value_states, position_bias, *args, **options)


def _with_own_table(
    t5: Any,
    forward: Any,
    layer: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    *,
    attention_mask: Any = None,
    **options: Any,
) -> Any:
    """Compute a layer of UMT5 by the code of T5's, which is the same but takes its bias, and so makes none of all pairs."""
    options[ACROSS] = across = encoder_hidden_states is not None
    options["position_bias"] = PositionBias(None if across else FirstTable(layer, hidden_states.device))
    out, _, weights = t5.forward(layer, hidden_states, attention_mask, encoder_hidden_states, **options)
    return out, weights


def _of_padding(mask: Tensor, rows: int) -> TokenMask:
    """Return the tokens of a mask `(batch, 1, 1, keys)`: bools, or 0 for them and numbers that hide padding from scores."""
    of_keys, keys = mask[:, 0, 0], mask.shape[3]
    if mask.dtype is torch.bool:
        of_keys = torch.where(of_keys, 0.0, -torch.inf)
    tokens = of_keys == 0
    is_of_padding = (tokens | (of_keys <= hiding(of_keys.dtype))).all()
    text = "attention_mask has other numbers than 0 and 1, padding and tokens, which dilated attention does not add to scores"
    if torch.compiler.is_compiling():
        torch._assert_async(is_of_padding, text)
    elif not is_of_padding:
        raise ValueError(text)
    elif bool(tokens.all()):
        return TokenMask(False, rows, keys)
    return TokenMask(False, rows, keys, tokens, of_tokens(tokens) if rows == keys else None)
