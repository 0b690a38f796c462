"""GigaPath's slide encoder trained in bf16: a forward and a backward pass, by its published procedure on torch and by dilkit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dilkit.integrations.gigapath import SlideEncoder, SlideEncoderConfig
from dilkit.testing.accuracy import Check
from dilkit.tools.bench.cpu.measured import SlideCase
from dilkit.tools.bench.slide_calls import CHECKED, shorter, slide
from dilkit.tools.bench.slides import PUBLISHED
from dilkit.tools.bench.ways import timed
from dilkit.tools.measure.published_slides import published_forward
from dilkit.tools.measure.single_call import AGREEMENT_BF16, agreement
from dilkit.tools.results.record import Entries, Entry

Trained = Callable[[], tuple[Tensor, Tensor]]
"""Gives the embedding of a slide, and the gradients of all weights one after the other."""


def encoder(config: SlideEncoderConfig, tiles: int, divisor: int, repeats: int) -> SlideCase:
    """Whether both ways agree, on a short slide; then their times on one of so many tiles, in turns."""
    short = ways(shorter(config, max(tiles // CHECKED, divisor)), min(tiles // divisor, CHECKED))
    checks = tuple(_checks(short, min(tiles // divisor, CHECKED)))
    wrong = tuple(check.complaint for check in checks if not check.passed)
    entry = Entry(verdict="wrong" if wrong else "measured", reasons=wrong, check=checks)
    calls = ways(shorter(config, divisor), tiles // divisor)
    entries: Entries = dict.fromkeys(calls, entry)
    return SlideCase(tiles=(tiles // divisor,), depth=config.depth, **timed(entries, calls, repeats))


def ways(config: SlideEncoderConfig, tiles: int) -> dict[str, Trained]:
    """Both, of one model and one slide."""
    torch.manual_seed(0)
    model = SlideEncoder(config).eval()
    inputs = slide(tiles, config)
    dout = torch.randn(1, config.embed_dim)
    theirs, ours = partial(published_forward, model, *inputs), partial(_embedding, model, *inputs)
    return {PUBLISHED: partial(_trained, model, theirs, dout), "native": partial(_trained, model, ours, dout)}


def _embedding(model: SlideEncoder, *inputs: Tensor) -> Tensor:
    out: Tensor = model(*inputs)[0]
    return out


def _trained(model: SlideEncoder, forward: Callable[[], Tensor], dout: Tensor) -> tuple[Tensor, Tensor]:
    """One pass forward and one backward, under autocast as GigaPath is trained."""
    weights = [*model.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        out = forward()
    gradients = torch.autograd.grad(out, weights, dout.to(out.dtype), materialize_grads=True)
    return out.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def _checks(both: dict[str, Trained], tiles: int) -> Iterator[Check]:
    """Whether the embeddings and the gradients of both are one."""
    theirs, ours = (both[name]() for name in (PUBLISHED, "native"))
    for what, one, other in zip(("embedding", "gradients"), ours, theirs, strict=True):
        yield agreement(what, one, other, tiles, AGREEMENT_BF16)
