"""Slides with random features, and calls on them with their result, time and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dilkit import attention_mass, attention_rows
from dilkit.integrations.gigapath import SlideEncoder, SlideEncoderConfig
from dilkit.pattern import Pattern
from dilkit.testing import memory
from dilkit.testing.accuracy import Check

AGREEMENT = 1e-4
"""Largest difference that two ways of computing may have in fp32, in units of the largest value."""
CHECKED = 600
"""Tiles of the slide on which `attention_mass` is compared with the weights of all rows."""


@dataclass(frozen=True)
class Once:
    """One call: its result, its seconds, and the bytes that it held beyond what was held before, None where `why` not."""

    result: Any
    seconds: float
    peak_bytes: int | None
    why: str | None = None


def once(call: Callable[[], Any]) -> Once:
    """Call it, once."""
    found: list[tuple[Any, float]] = []

    def timed() -> None:
        start = perf_counter()
        found.append((call(), perf_counter() - start))

    try:
        peak: int | None = memory.peak_memory(timed)
        why = None
    except memory.MeasureError as error:
        peak, why = None, str(error)
        timed()
    return Once(*found[0], peak, why)


def slide(tiles: int, config: SlideEncoderConfig) -> tuple[Tensor, Tensor]:
    """Features `(1, tiles, in_chans)` and coordinates `(1, tiles, 2)`, the same whenever they are made."""
    generator = torch.Generator().manual_seed(tiles)
    features = torch.randn(1, tiles, config.in_chans, generator=generator)
    return features, torch.randint(0, config.ngrids * config.tile_size, (1, tiles, 2), generator=generator)


def padded(slides: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Features, coordinates and mask of all slides in one batch, as long as the longest of them."""
    features, coords = (pad_sequence([one[i][0] for one in slides], batch_first=True) for i in range(2))
    lengths = torch.tensor([one.shape[1] for one, _ in slides])
    return features, coords, torch.arange(features.shape[1]) >= lengths[:, None]


def embedding(model: SlideEncoder, *inputs: Tensor) -> Tensor:
    """The embeddings of slides, `(batch, embed_dim)`, without gradients."""
    with torch.no_grad():
        found: Tensor = model(*inputs)[0]
    return found


def gradients(model: SlideEncoder, tiles: Tensor, coords: Tensor) -> Tensor:
    """The embedding of a slide, after a backward pass that leaves its gradients in the weights."""
    found: Tensor = model(tiles, coords)[0]
    torch.autograd.backward(found.sum())
    return found.detach()


def agreement(ours: Tensor, theirs: Tensor, tiles: int) -> Check:
    """Whether two embeddings in fp32 are one."""
    return _close("embedding", ours, theirs, tiles)


def mass_check(pattern: Pattern, heads: int, head_dim: int) -> Check:
    """Whether `attention_mass` is the sum of all rows of weights, on a short slide."""
    query, key = torch.randn(2, 1, CHECKED, heads, head_dim).unbind()
    exact = attention_rows(query.double(), key.double(), pattern, range(CHECKED)).sum(dim=2)
    return _close("attention_mass", attention_mass(query, key, pattern), exact, CHECKED)


def _close(what: str, found: Tensor, other: Tensor, tiles: int) -> Check:
    error, largest = ((x.abs().max().item()) for x in (found.double() - other.double(), other))
    return Check.of(what, tiles, error, 0.0, AGREEMENT * largest)
