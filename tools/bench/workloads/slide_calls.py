"""Slides with random features, and their embeddings by GigaPath's encoder, by dilkit and by the published procedure.

The published procedure, with flash-attn replaced by torch's own fused kernel:
rows -> for each branch: pad to whole segments -> gather kept rows -> fused kernel -> scatter into zeros -> cut
     -> sum of all branches, weighted by the softmax over their denominators
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, unflatten
from torch.nn import functional as F

from dilkit import attention_mass, attention_rows
from dilkit.integrations.gigapath import SlideEncoder, SlideEncoderConfig
from dilkit.integrations.gigapath.layers import EncoderLayer
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.testing.accuracy import Check
from dilkit.tools.bench.configuration import divided
from dilkit.tools.measure.baselines import branch_attention, merged
from dilkit.tools.measure.case import agreement

CHECKED = 600
"""Tiles of the slide on which `attention_mass` is compared with the weights of all rows."""


def slide(tiles: int, config: SlideEncoderConfig) -> tuple[Tensor, Tensor]:
    """Features `(1, tiles, in_chans)` and coordinates `(1, tiles, 2)`, a cell for each tile, the same whenever they are made."""
    generator = torch.Generator().manual_seed(tiles)
    features = torch.randn(1, tiles, config.in_chans, generator=generator)
    cells = torch.randperm(config.ngrids**2, generator=generator)[:tiles]
    return features, config.tile_size * torch.stack((cells // config.ngrids, cells % config.ngrids), dim=1)[None]


def shorter(config: SlideEncoderConfig, divisor: int) -> SlideEncoderConfig:
    """The sizes with segments so many times shorter, as --quick has them."""
    return replace(config, segment_lengths=divided(config.segment_lengths, config.dilation_rates, divisor))


def mass_check(pattern: Pattern, heads: int, head_dim: int) -> Check:
    """Compare `attention_mass` with the sum of all rows of weights, on a short slide."""
    query, key = torch.randn(2, 1, CHECKED, heads, head_dim).unbind()
    exact = attention_rows(query.double(), key.double(), pattern, range(CHECKED)).sum(dim=2)
    return agreement("attention_mass", attention_mass(query, key, pattern), exact, CHECKED)


def published_embedding(model: SlideEncoder, tiles: Tensor, coords: Tensor) -> Tensor:
    """The embedding of one slide, `(1, embed_dim)`, by a model's weights and the published procedure: all rows in every layer."""
    x, _ = model.packed(tiles, coords)
    for layer in model.layers():
        x = x + layer.self_attn.projected(_seen(layer, x, model.config.pattern))
        x = x + layer.ffn(layer.final_layer_norm(x))
    x = model.encoder["layer_norm"](x)
    out: Tensor = model.norm(x[1:].mean(dim=0, keepdim=True) if model.config.global_pool else x[:1])
    return out


def _seen(layer: EncoderLayer, x: Tensor, pattern: Pattern) -> Tensor:
    """The attention of a layer, with `tail="zeros"`: short segments are filled with rows of zeros."""
    query, key, value = (one.unsqueeze(0) for one in layer.self_attn.heads(layer.self_attn_layer_norm(x)))
    pairs = [(min(branch.segment_length, query.shape[1]), branch.dilation_rate) for branch in pattern.segments]
    branches = [_padded_branch(query, key, value, pattern, length, rate) for length, rate in pairs]
    return merged([out for out, _ in branches], [lse for _, lse in branches]).flatten(2).squeeze(0)


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
