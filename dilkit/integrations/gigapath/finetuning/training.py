"""Training: steps of the optimizer, saved, and resumed bit by bit the same."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilkit import files
from dilkit.integrations.gigapath.checkpoint import load_tensors
from dilkit.integrations.gigapath.finetuning.labels import Labels, Splits
from dilkit.integrations.gigapath.finetuning.model import SlideModel, seeded
from dilkit.integrations.gigapath.finetuning.record import Epoch, Settings

MIXER = 1_000_003
"""Factor of a seed before a step or a slide is added, so that seeds do not meet."""
SAVE_SECONDS = 600.0
"""Within an epoch too, training is saved as often as that."""
FORMAT = 2


class Training:
    """Training of a `SlideModel` on `splits.train`. `losses` are those of the steps so far, `curve` of the epochs.

    A step whose slides have no loss, such as Cox's where nobody has the event, is passed over, with 0 as its loss. Random numbers
    depend on the seed, the step and the slide alone, so that a run that `save` wrote and `load` reads goes on bit by bit. `facts`
    are those of the run, by name; a file of a run with others is refused.
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
        return self.steps // self.settings.epochs

    @property
    def steps(self) -> int:
        return self.settings.steps(len(self.splits.train))

    def run(self, checkpoint: Path, progress: Callable[[int, int, float], None] | None = None) -> None:
        """Train to the end. `checkpoint` is written after each epoch, and every 10 minutes within; `progress(step, steps, loss)`.

        Raises ValueError for a loss that is not finite, before it changes a weight.
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
        """Write a checkpoint that `load` reads. If writing fails, the earlier file stays as it was."""
        content = dict(format=FORMAT, facts=self.facts, losses=self.losses, seconds=self.seconds)
        content |= dict(curve=[astuple(one) for one in self.curve], optimizer=self.optimizer.state_dict())
        content["weights"] = {name: weight.detach() for name, weight in self.model.trained().items()}
        with files.replacing(path) as file:
            torch.save(content, file)

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
        with torch.no_grad():
            for name, weight in self.model.trained().items():
                weight.copy_(content["weights"][name])
        self.optimizer.load_state_dict(content["optimizer"])
        self.losses, self.seconds = list(content["losses"]), content["seconds"]
        self.curve = [Epoch(*values) for values in content["curve"]]

    def _step(self) -> None:
        step = len(self.losses)
        group = self._slides_of(step)
        set_rate(self.optimizer, rate_at(step / self.steps_of_epoch, self.settings))
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

    def _slides_of(self, step: int) -> list[int]:
        epoch, part = divmod(step, self.steps_of_epoch)
        generator = torch.Generator().manual_seed(self.settings.seed * MIXER + epoch)
        order = torch.randperm(len(self.splits.train), generator=generator).tolist()
        size = self.settings.accumulate
        return [self.splits.train[place] for place in order[part * size : (part + 1) * size]]

    def _epoch(self) -> Epoch:
        last = self.losses[-self.steps_of_epoch :]
        groups = [self._slides_of(step) for step in range(len(self.losses) - len(last), len(self.losses))]
        sizes = [len(group) if self.objective.defined(group) else 0 for group in groups]
        train = sum(loss * size for loss, size in zip(last, sizes, strict=True)) / sum(sizes)
        val = None
        if self.objective.defined(self.splits.val):
            val = self.objective.loss(self.scores(self.splits.val), self.splits.val).item()
        return Epoch(len(self.curve) + 1, rate_at((len(self.losses) - 1) / self.steps_of_epoch, self.settings), train, val)


def accumulate(model: SlideModel, indices: Sequence[int], objective: Objective, seed: int) -> float:
    """Add the gradients of the joint loss of these slides, as of one batch, to those of the parameters; return the loss.

    Where that loss is not the mean of the slides' own, each slide is computed twice: for its score, then with the gradient of
    that. `seed` decides what is dropped, alike in both passes.
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
LAYER = "encoder.layers."


def layer_scale(name: str, depth: int, decay: float) -> float:
    """Return `decay` to the power of the layers after a parameter of `SlideEncoder`, the head being one: 1 for its last norms.

    Raises ValueError for an unknown name.
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
    """Return the rate of the head after `epoch` epochs, a fraction within one: rising linearly, then half a cosine."""
    if epoch < settings.warmup_epochs:
        return settings.peak_rate * epoch / settings.warmup_epochs
    past = (epoch - settings.warmup_epochs) / (settings.epochs - settings.warmup_epochs)
    return settings.least_rate + (settings.peak_rate - settings.least_rate) * (1 + math.cos(math.pi * past)) / 2


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]


class Objective:
    """The targets of all slides, and the loss of some of them: the mean of -log softmax(scores)[class], or `cox_loss`.

    `outputs`: scores of a slide. `separable`: True if the loss of several slides is the mean of their own.
    """

    def __init__(self, labels: Labels) -> None:
        self.separable, examples = not labels.is_survival, labels.examples
        self.outputs = len(labels.classes) or 1
        if self.separable:
            self._targets = torch.tensor([labels.classes.index(str(one.label)) for one in examples])
        else:
            self._times = torch.tensor([one.time for one in examples], dtype=torch.float64)
            self._events = torch.tensor([bool(one.event) for one in examples])

    def defined(self, indices: Sequence[int]) -> bool:
        return len(indices) > 0 if self.separable else bool(self._events[list(indices)].any())

    def loss(self, scores: Tensor, indices: Sequence[int]) -> Tensor:
        rows = list(indices)
        if self.separable:
            return F.cross_entropy(scores, self._targets[rows].to(scores.device))
        return cox_loss(scores[:, 0], self._times[rows].to(scores.device), self._events[rows].to(scores.device))


def cox_loss(scores: Tensor, times: Tensor, events: Tensor) -> Tensor:
    """Return Cox's loss, -1 / events * sum over events i of (s_i - log(sum over times_j >= times_i of exp(s_j))).

    All are `(n,)`, `events` bool. Efron's rule treats d events at one time: the sum of the k-th of them, k = 0 to d - 1, loses k
    / d of their contributions. Without an event the loss and its gradient are 0.
    """
    if not bool(events.any()):
        return scores.sum() * 0.0
    event_scores, event_times = scores[events], times[events]
    at_risk = torch.where(times >= event_times[:, None], scores, -torch.inf).logsumexp(dim=1)
    same_time = event_times == event_times[:, None]
    tied = torch.where(same_time, event_scores, -torch.inf).logsumexp(dim=1)
    earlier, events_at_time = (x.sum(dim=1).to(scores.dtype) for x in (same_time.tril(-1), same_time))
    taken = torch.log1p(-earlier / events_at_time * (tied - at_risk).exp())
    return (at_risk + taken - event_scores).mean()
