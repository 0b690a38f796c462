"""The gradients of one step of the optimizer, slide by slide: memory holds the activations of a single slide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dilkit.integrations.gigapath.finetuning.model import SlideModel
from dilkit.integrations.gigapath.finetuning.objectives import Objective

MIXER = 1_000_003


def accumulate(model: SlideModel, indices: Sequence[int], objective: Objective, seed: int) -> float:
    """Add the gradients of the loss of these slides together to those of the parameters: the loss.

    They are those of one batch of all these slides. Where the loss of several slides is not the mean of their own, scores are
    computed first, without gradients, then the gradient of each score, and with that the slide once more. `seed` decides what is
    dropped, of each slide anew, and alike in both passes.
    """
    if objective.separable:
        return sum(_backward_of_own_loss(model, index, objective, seed, len(indices)) for index in indices)
    with torch.no_grad():
        scores = torch.stack([_scored(model, index, seed) for index in indices])
    scores.requires_grad_()
    loss = objective.loss(scores, indices)
    (gradients,) = torch.autograd.grad(loss, scores)
    for index, gradient in zip(indices, gradients, strict=True):
        _scored(model, index, seed).backward(gradient)  # type: ignore[no-untyped-call]
    return loss.item()


def _backward_of_own_loss(model: SlideModel, index: int, objective: Objective, seed: int, slides: int) -> float:
    loss = objective.loss(_scored(model, index, seed)[None], [index]) / slides
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def _scored(model: SlideModel, index: int, seed: int) -> Tensor:
    """The scores of a slide, with random numbers that depend on the seed and the slide alone."""
    with seeded(seed * MIXER + index, model.encoder.cls_token.device):
        out: Tensor = model(index)
        return out


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Within the block torch's random numbers on the CPU and on `device` begin with `seed`; afterwards they go on as before."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed % 2**63)
        yield
