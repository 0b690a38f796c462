"""GigaPath's slide encoder by its published procedure, flash-attn replaced by torch's own fused kernel. For comparisons only.

rows -> for each branch: pad to whole segments -> gather kept rows -> fused kernel -> scatter into zeros -> cut
     -> sum of all branches, weighted by the softmax over their denominators
"""

from __future__ import annotations

import torch
from torch import Tensor, unflatten
from torch.nn import functional as F

from dilkit.integrations.gigapath import SlideEncoder
from dilkit.integrations.gigapath.layers import EncoderLayer
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.tools.measure.baselines import branch_attention, merged


def published_embedding(model: SlideEncoder, tiles: Tensor, coords: Tensor) -> Tensor:
    """The embedding of one slide, `(1, embed_dim)`, by a model's weights, without gradients."""
    with torch.no_grad():
        return published_forward(model, tiles, coords)


def published_forward(model: SlideEncoder, tiles: Tensor, coords: Tensor) -> Tensor:
    """The same with a graph, where gradients are recorded: all rows at once in every layer."""
    x, _ = model.packed(tiles, coords)
    for layer in model.layers():
        x = _layer(layer, x, model.config.pattern)
    x = model.encoder["layer_norm"](x)
    out: Tensor = model.norm(x[1:].mean(dim=0, keepdim=True) if model.config.global_pool else x[:1])
    return out


def _layer(layer: EncoderLayer, x: Tensor, pattern: Pattern) -> Tensor:
    x = x + layer.self_attn.projected(_seen(layer, x, pattern))
    out: Tensor = x + layer.ffn(layer.final_layer_norm(x))
    return out


def _seen(layer: EncoderLayer, x: Tensor, pattern: Pattern) -> Tensor:
    query, key, value = (one.unsqueeze(0) for one in layer.self_attn.heads(layer.self_attn_layer_norm(x)))
    return published_attention(query, key, value, pattern).flatten(2).squeeze(0)


def published_attention(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> Tensor:
    """Attention of `(batch, seq, heads, head_dim)` with `tail="zeros"`: short segments are filled with rows of zeros."""
    pairs = [(min(branch.segment_length, query.shape[1]), branch.dilation_rate) for branch in pattern.segments]
    branches = [_padded_branch(query, key, value, pattern, length, rate) for length, rate in pairs]
    return merged([out for out, _ in branches], [lse for _, lse in branches])


def _padded_branch(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, length: int, rate: int) -> tuple[Tensor, Tensor]:
    """`out` `(batch, seq, heads, head_dim)`, `lse` `(batch, heads, seq)` of a branch."""
    seq, whole = query.shape[1], length + -length % rate
    query, key, value = (_filled(x, length, whole) for x in (query, key, value))
    out, lse = branch_attention(query, key, value, Problem.of(query, key, pattern), whole, rate)
    rows = unflatten(out, 1, (-1, whole))[:, :, :length].flatten(1, 2)[:, :seq]
    return rows, unflatten(lse, 2, (-1, whole))[..., :length].flatten(2)[..., :seq]


def _filled(x: Tensor, length: int, whole: int) -> Tensor:
    """`x` as segments of `whole` rows, of which the first `length` are its own, or zeros where they end early."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % length))
    return F.pad(unflatten(x, 1, (-1, length)), (0, 0, 0, 0, 0, whole - length)).flatten(1, 2)
