"""LongT5's local attention, which layers of its encoder compute by themselves: here they ask the attention function.

keys          three blocks of `local_radius + 1`, masked to the radius    `|i - j| <= local_radius`, a `SlidingWindow`
bias          of each pair of a block, the mask added to it               `PositionBias` of the first layer's table
mask          (batch, 1, blocks, rows, keys) of tokens                    a `TokenMask`: its diagonal
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dilkit.integrations.transformers.biases.alibi import watched_forward
from dilkit.integrations.transformers.biases.tables import FirstTable, PositionBias
from dilkit.integrations.transformers.checks import wants_weights
from dilkit.integrations.transformers.sequences import TokenMask, of_tokens

LOCAL = "LocalSelfAttention"
"""The name of such a layer in a block. `TransientGlobalSelfAttention` attends to sums of blocks, too, and stays as it is."""


def watch_local(model: Any, is_ours: Callable[[object], bool]) -> None:
    """Have the local layers of a class of models ask the attention function where `is_ours(name)`; once is enough."""
    for home in {kind.__module__ for kind in model.__mro__}:
        stack, layer = (getattr(sys.modules.get(home), name, None) for name in ("LongT5Stack", "LongT5LocalAttention"))
        if stack is not None and layer is not None and not hasattr(layer.forward, "watched_by"):
            stack.forward, layer.forward = _knowing(stack.forward), watched_forward(layer.forward, _asked, is_ours)


def local_layers(model: Any) -> dict[str, Any]:
    """Return the local layers of a model by their paths, each with the configuration and the number that it lacks."""
    stacks = {path: x for path, x in model.named_modules() if type(x).__name__ == "LongT5Stack"}
    layers = {}
    for path, stack in stacks.items():
        for number, block in enumerate(stack.block):
            if (layer := getattr(block.layer[0], LOCAL, None)) is not None:
                layer.config, layer.layer_idx, layer.is_causal = stack.config, number, False
                layers[f"{path}.block.{number}.layer.0.{LOCAL}".lstrip(".")] = layer
    return layers


def _knowing(forward: Any) -> Any:
    @functools.wraps(forward)
    def knowing(stack: Any, *args: Any, **options: Any) -> Any:
        local_layers(stack)  # of a model that was made, copied or loaded in any way
        return forward(stack, *args, **options)

    return knowing


def _asked(
    layer: Any, hidden_states: Tensor, mask: Tensor, position_bias: PositionBias | None = None, output_attentions: bool = False
) -> tuple[Tensor, PositionBias]:
    wants_weights(layer, dict(output_attentions=output_attentions), refused="windows of LongT5, which have weights by blocks")
    rows = hidden_states.shape[1]
    if position_bias is None:
        position_bias = PositionBias(FirstTable(layer, hidden_states.device))
    tokens = mask[:, 0].diagonal(layer.block_len, 2, 3).flatten(1)[:, :rows]
    padded = torch.compiler.is_compiling() or not bool(tokens.all())
    seen, packing = (tokens, of_tokens(tokens)) if padded else (None, None)
    of_heads = (x(hidden_states).unflatten(2, (layer.n_heads, -1)).transpose(1, 2) for x in (layer.q, layer.k, layer.v))
    interface = sys.modules["transformers"].AttentionInterface()  # torch.compile traces no import
    out = interface[layer.config._attn_implementation](
        layer,
        *of_heads,
        TokenMask(False, rows, rows, seen, packing),
        scaling=1.0,
        dropout=layer.dropout if layer.training else 0.0,
        position_bias=position_bias,
        sliding_window=layer.local_radius + 1,
    )[0]
    return layer.o(out.flatten(2)), position_bias
