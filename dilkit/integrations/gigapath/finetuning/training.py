"""The course of training: steps of the optimizer, what is saved of them, and how they go on from there, bit by bit the same."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dilkit import files
from dilkit.integrations.gigapath.checkpoint import load_tensors
from dilkit.integrations.gigapath.finetuning.model import SlideModel, seeded
from dilkit.integrations.gigapath.finetuning.objectives import Objective
from dilkit.integrations.gigapath.finetuning.record import Epoch
from dilkit.integrations.gigapath.finetuning.settings import Settings
from dilkit.integrations.gigapath.finetuning.splits import Splits

MIXER = 1_000_003
"""Factor of a seed before a step or a slide is added, so that seeds do not meet."""
SAVE_SECONDS = 600.0
"""Within an epoch too, training is saved as often as that."""
FORMAT = 2


class Training:
    """Training of a `SlideModel` on the slides of `splits.train`. `losses` are those of the steps so far, `curve` of the epochs.

    A step whose slides have no loss, such as Cox's where nobody has the event, is passed over, with 0 as its loss.
    Random numbers depend on the seed, the step and the slide alone, so that training that `save` wrote and `load` reads goes on
    as if nothing had been between. `facts` say by name what a run is of; a file of a run with others is refused.
    """

    def __init__(
        self, model: SlideModel, objective: Objective, splits: Splits, settings: Settings, facts: Mapping[str, str]
    ) -> None:
        self.model, self.objective, self.splits, self.settings = model, objective, splits, settings
        self.facts = dict(facts)
        self.optimizer = optimizer_of(model.encoder, model.head, model.encoder.config.depth, settings)
        self.losses: list[float] = []
        self.curve: list[Epoch] = []
        self.seconds = 0.0

    @property
    def steps_of_epoch(self) -> int:
        """Steps of the optimizer in an epoch."""
        return -(-len(self.splits.train) // self.settings.accumulate)

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        return self.steps_of_epoch * self.settings.epochs

    def run(self, checkpoint: Path, progress: Callable[[int, int, float], None] | None = None) -> None:
        """Train to the end. `checkpoint` is written after each epoch, and every 10 minutes within; `progress(step, steps, loss)`.

        Raises ValueError for a loss that is not finite, before the weights take anything from it.
        """
        start, earlier = time.monotonic(), self.seconds
        saved = start
        while len(self.losses) < self.steps:
            self._step()
            self.seconds = earlier + time.monotonic() - start
            if progress:
                progress(len(self.losses), self.steps, self.losses[-1])
            if len(self.losses) % self.steps_of_epoch == 0:
                self.curve.append(self._epoch())
            elif time.monotonic() - saved < SAVE_SECONDS:
                continue
            self.save(checkpoint)
            saved = time.monotonic()

    def scores(self, indices: Sequence[int]) -> Tensor:
        """Return the scores `(n, outputs)` of slides, in eval mode, in double precision on the CPU."""
        self.model.eval()
        with torch.no_grad():
            return torch.stack([self.model(index) for index in indices]).double().cpu()

    def save(self, path: Path) -> None:
        """Write what `load` needs; the file is there whole or as it was."""
        weights = {name: weight.detach() for name, weight in self.model.trained().items()}
        course = dict(losses=self.losses, curve=[astuple(one) for one in self.curve], seconds=self.seconds)
        with files.replacing(path) as file:
            facts = dict(format=FORMAT, facts=self.facts)
            torch.save({**facts, **course, "weights": weights, "optimizer": self.optimizer.state_dict()}, file)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote. Raises ValueError for another file, or one of a run that differs, naming in what."""
        content = load_tensors(path)
        if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("facts"), dict):
            raise ValueError(f"{path} is no checkpoint of format {FORMAT}, as this version writes it; choose another folder")
        facts = content["facts"]
        differing = [
            f"{name} ({facts.get(name)} there, {here} here)" for name, here in self.facts.items() if facts.get(name) != here
        ]
        if differing:
            raise ValueError(f"{path} is of a run with other {'; '.join(differing)}; give the same, or another folder")
        self.model.load_trained(content["weights"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.losses, self.seconds = list(content["losses"]), content["seconds"]
        self.curve = [Epoch(*values) for values in content["curve"]]

    def _step(self) -> None:
        step = len(self.losses)
        group = self._slides_of(step)
        set_rate(self.optimizer, self._rate(step))
        self.model.train()
        self.optimizer.zero_grad()
        if not self.objective.defined(group):
            self.losses.append(0.0)
            return
        loss = accumulate(self.model, group, self.objective, self.settings.seed * MIXER + step)
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss of step {step + 1} is {loss}; lower base_rate={self.settings.base_rate}, or warm up longer"
            )
        self.optimizer.step()
        self.losses.append(loss)

    def _rate(self, step: int) -> float:
        return rate_at(step / self.steps_of_epoch, self.settings)

    def _slides_of(self, step: int) -> list[int]:
        """Return the slides of a step: those of an epoch in an order of chance, cut into groups."""
        epoch, part = divmod(step, self.steps_of_epoch)
        generator = torch.Generator().manual_seed(self.settings.seed * MIXER + epoch)
        order = torch.randperm(len(self.splits.train), generator=generator).tolist()
        size = self.settings.accumulate
        return [self.splits.train[place] for place in order[part * size : (part + 1) * size]]

    def _epoch(self) -> Epoch:
        """Return the losses and the rate of the epoch that has just ended."""
        last = self.losses[-self.steps_of_epoch :]
        groups = [self._slides_of(step) for step in range(len(self.losses) - len(last), len(self.losses))]
        sizes = [len(group) if self.objective.defined(group) else 0 for group in groups]
        train = sum(loss * size for loss, size in zip(last, sizes, strict=True)) / sum(sizes)
        val = None
        if self.objective.defined(self.splits.val):
            val = self.objective.loss(self.scores(self.splits.val), self.splits.val).item()
        return Epoch(len(self.curve) + 1, self._rate(len(self.losses) - 1), train, val)


def accumulate(model: SlideModel, indices: Sequence[int], objective: Objective, seed: int) -> float:
    """Add the gradients of the joint loss of these slides to those of the parameters. Returns the loss.

    They are those of one batch of all these slides. Where the loss of several slides is not the mean of their own, scores are
    computed first, without gradients, then the gradient of each score, and with that the slide once more. `seed` decides what is
    dropped, of each slide anew, and alike in both passes.
    """
    if objective.separable:
        total = 0.0
        for index in indices:
            loss = objective.loss(_scored(model, index, seed)[None], [index]) / len(indices)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total
    with torch.no_grad():
        scores = torch.stack([_scored(model, index, seed) for index in indices])
    scores.requires_grad_()
    loss = objective.loss(scores, indices)
    (gradients,) = torch.autograd.grad(loss, scores)
    for index, gradient in zip(indices, gradients, strict=True):
        _scored(model, index, seed).backward(gradient)  # type: ignore[no-untyped-call]
    return loss.item()


def _scored(model: SlideModel, index: int, seed: int) -> Tensor:
    """Return the scores of a slide, with random numbers that depend on the seed and the slide alone."""
    with seeded(seed * MIXER + index, model.encoder.cls_token.device):
        out: Tensor = model(index)
        return out


FIRST = ("cls_token", "patch_embed.")
"""Parameters before the first layer."""
LAYER = "encoder.layers."


def layer_scale(name: str, depth: int, decay: float) -> float:
    """Return `decay` to the power of the layers after a parameter of `SlideEncoder`, the head being one: 1 for its last norms.

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
    """Make AdamW for the trained parameters, grouped by scale of the rate and weight decay; vectors do not decay."""
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
    """Return the rate of the head after `epoch` epochs, a fraction within one: rising linearly, then half a cosine.

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
