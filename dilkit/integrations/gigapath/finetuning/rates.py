"""Learning rates by layer and by step, and the optimizer that has them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from dilkit.integrations.gigapath.finetuning.settings import Settings

FIRST = ("cls_token", "patch_embed.")
"""Parameters before the first layer."""
LAYER = "encoder.layers."


def layer_scale(name: str, depth: int, decay: float) -> float:
    """`decay` to the power of the layers that follow a parameter of `SlideEncoder`, the head being one: 1 for its last norms.

    Raises ValueError for a name that no such parameter has.

    >>> [layer_scale(name, 2, 0.5) for name in ("cls_token", "encoder.layers.0.ffn.fc1.bias", "encoder.layers.1.ffn.fc1.bias")]
    [0.125, 0.25, 0.5]
    """
    if name.startswith(FIRST):
        return decay ** (depth + 1)
    if name.startswith(LAYER):
        return decay ** (depth - int(name.removeprefix(LAYER).partition(".")[0]))
    if name.startswith(("encoder.layer_norm.", "norm.")):
        return 1.0
    raise ValueError(f"name={name!r} is no parameter of a SlideEncoder, so that no layer is known for it")


def optimizer_of(encoder: nn.Module, head: nn.Module, depth: int, settings: Settings) -> torch.optim.AdamW:
    """AdamW on what is trained, grouped by scale of the rate and weight decay; vectors, such as biases, do not decay."""
    scaled = [(weight, 1.0) for weight in head.parameters()]
    scaled += [
        (weight, layer_scale(name, depth, settings.layer_decay))
        for name, weight in encoder.named_parameters()
        if weight.requires_grad
    ]
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for weight, scale in scaled:
        groups.setdefault((scale, settings.weight_decay if weight.dim() > 1 else 0.0), []).append(weight)
    listed: list[dict[str, Any]] = [dict(params=params, scale=s, weight_decay=decay) for (s, decay), params in groups.items()]
    return torch.optim.AdamW(listed, lr=settings.peak_rate)


def rate_at(epoch: float, settings: Settings) -> float:
    """The rate of the head after `epoch` epochs, a fraction within one: rising linearly, then half a cosine.

    >>> [round(rate_at(epoch, Settings(epochs=5, base_rate=8e-3, least_rate=0.0)), 6) for epoch in (0, 0.5, 1, 3, 5)]
    [0.0, 0.0005, 0.001, 0.0005, 0.0]
    """
    if epoch < settings.warmup_epochs:
        return settings.peak_rate * epoch / settings.warmup_epochs
    past = (epoch - settings.warmup_epochs) / (settings.epochs - settings.warmup_epochs)
    return settings.least_rate + (settings.peak_rate - settings.least_rate) * (1 + math.cos(math.pi * past)) / 2


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give each group the rate times its scale."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]
