"""Slides with random features, and what is computed of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dilkit import attention_mass, attention_rows
from dilkit.integrations.gigapath import SlideEncoder, SlideEncoderConfig
from dilkit.pattern import Pattern
from dilkit.testing.accuracy import Check
from dilkit.tools.measure.timing import agreement

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
    pairs = zip(config.segment_lengths, config.dilation_rates, strict=True)
    return replace(config, segment_lengths=tuple(max(length // divisor, rate) for length, rate in pairs))


def embedding(model: SlideEncoder, *inputs: Tensor) -> Tensor:
    """The embeddings of slides, `(batch, embed_dim)`, without gradients."""
    with torch.no_grad():
        out: Tensor = model(*inputs)[0]
    return out


def gradients(model: SlideEncoder, tiles: Tensor, coords: Tensor) -> Tensor:
    """The embedding of a slide, after a backward pass that leaves its gradients in the weights."""
    out: Tensor = model(tiles, coords)[0]
    torch.autograd.backward(out.sum())
    return out.detach()


def mass_check(pattern: Pattern, heads: int, head_dim: int) -> Check:
    """Compare `attention_mass` with the sum of all rows of weights, on a short slide."""
    query, key = torch.randn(2, 1, CHECKED, heads, head_dim).unbind()
    exact = attention_rows(query.double(), key.double(), pattern, range(CHECKED)).sum(dim=2)
    return agreement("attention_mass", attention_mass(query, key, pattern), exact, CHECKED)
