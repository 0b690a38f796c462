"""The objectives of training: cross entropy of classes, or Cox's partial likelihood of times.

An objective holds the targets of all slides; `loss(scores, indices)` is of the scores `(n, outputs)` of those slides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dilkit.integrations.gigapath.finetuning.labels import Labels


class Objective(Protocol):
    """`separable`: whether the loss of several slides is the mean of their own. `defined`: whether they have one."""

    @property
    def outputs(self) -> int: ...

    @property
    def separable(self) -> bool: ...

    def defined(self, indices: Sequence[int]) -> bool: ...

    def loss(self, scores: Tensor, indices: Sequence[int]) -> Tensor: ...


@dataclass(frozen=True)
class ClassObjective:
    """The mean over slides of -log softmax(scores)[class]; `targets` `(slides,)` are classes by number."""

    targets: Tensor
    outputs: int
    separable: bool = True

    def defined(self, indices: Sequence[int]) -> bool:
        return len(indices) > 0

    def loss(self, scores: Tensor, indices: Sequence[int]) -> Tensor:
        return F.cross_entropy(scores, self.targets[list(indices)].to(scores.device))


@dataclass(frozen=True)
class SurvivalObjective:
    """Cox's partial likelihood among the slides that it is given: `times` `(slides,)` and `events`, bool `(slides,)`."""

    times: Tensor
    events: Tensor
    outputs: int = 1
    separable: bool = False

    def defined(self, indices: Sequence[int]) -> bool:
        return bool(self.events[list(indices)].any())

    def loss(self, scores: Tensor, indices: Sequence[int]) -> Tensor:
        rows = list(indices)
        return cox_loss(scores[:, 0], self.times[rows].to(scores.device), self.events[rows].to(scores.device))


def objective_of(labels: Labels) -> Objective:
    """Return the objective of what the file says: cross entropy for classes, Cox's partial likelihood for survival."""
    if labels.is_survival:
        times = torch.tensor([one.time for one in labels.examples], dtype=torch.float64)
        return SurvivalObjective(times, torch.tensor([bool(one.event) for one in labels.examples]))
    numbers = {name: number for number, name in enumerate(labels.classes)}
    targets = [numbers[one.label] for one in labels.examples if one.label is not None]
    return ClassObjective(torch.tensor(targets), len(numbers))


def cox_loss(scores: Tensor, times: Tensor, events: Tensor) -> Tensor:
    """Return -1 / events * sum over events i of (scores_i - log(sum over times_j >= times_i of exp(scores_j)))

    `scores`, `times` and `events` (bool) are `(n,)`; a higher score is a higher risk. Efron's rule
    treats d events at one time: the sum of the k-th of them, k = 0 to d - 1, loses k / d of their contributions. Without an event
    the loss is 0, and so is its gradient.
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
