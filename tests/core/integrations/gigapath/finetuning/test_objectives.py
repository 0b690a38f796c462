"""Cox's partial likelihood against its definition, written out with loops, ties and all."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.slide_tables import cohort
from torch import Tensor

from dilkit.integrations.gigapath.finetuning.objectives import cox_loss, objective_of


def by_definition(scores: list[float], times: list[float], events: list[bool]) -> float:
    """Efron's partial likelihood, an event at a time after the other."""
    total = 0.0
    for time in sorted({t for t, event in zip(times, events, strict=True) if event}):
        at_risk = sum(math.exp(s) for s, t in zip(scores, times, strict=True) if t >= time)
        tied = [s for s, t, event in zip(scores, times, events, strict=True) if event and t == time]
        for k, score in enumerate(tied):
            total += score - math.log(at_risk - k / len(tied) * sum(map(math.exp, tied)))
    return -total / sum(events)


@pytest.mark.parametrize("distinct", [1, 3, 5, 1000])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_loss_is_that_of_the_definition(distinct: int, share: float) -> None:
    generator = torch.Generator().manual_seed(distinct)
    scores = torch.randn(17, dtype=torch.float64, generator=generator)
    times = torch.randint(distinct, (17,), generator=generator).double()
    events = torch.rand(17, generator=generator) <= share
    events[0] = True
    loss = cox_loss(scores, times, events)
    assert loss.item() == pytest.approx(by_definition(scores.tolist(), times.tolist(), events.tolist()), rel=1e-12)


def test_gradients_are_those_of_the_loss() -> None:
    scores = torch.randn(7, dtype=torch.float64, requires_grad=True)
    times, events = torch.tensor([1.0, 1, 2, 2, 2, 3, 4]), torch.tensor([True, True, False, True, True, True, False])
    assert torch.autograd.gradcheck(lambda x: cox_loss(x, times, events), scores)


@pytest.mark.parametrize("scores", [torch.tensor([800.0, -800.0, 0.0]), torch.zeros(3)])
def test_extreme_scores_stay_finite(scores: Tensor) -> None:
    scores.requires_grad_()
    loss = cox_loss(scores, torch.tensor([1.0, 1.0, 2.0]), torch.tensor([True, True, False]))
    loss.backward()
    assert math.isfinite(loss.item())
    assert bool(scores.grad.isfinite().all())


def test_without_an_event_there_is_nothing_to_learn() -> None:
    scores = torch.randn(3, requires_grad=True)
    loss = cox_loss(scores, torch.arange(3.0), torch.zeros(3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(scores.grad, torch.zeros(3))


@pytest.mark.parametrize(("survival", "outputs"), [(True, 1), (False, 2)])
def test_targets_are_those_of_the_table(tmp_path, survival: bool, outputs: int) -> None:
    labels, _ = cohort(tmp_path, survival=survival)
    objective = objective_of(labels)
    scores, own = torch.randn(4, outputs, dtype=torch.float64), [7, 2, 5, 9]
    examples = [labels.examples[i] for i in own]
    if survival:
        expected = by_definition(scores[:, 0].tolist(), [one.time for one in examples], [one.event for one in examples])
    else:
        logs = scores.log_softmax(dim=1).tolist()
        expected = -sum(row["ab".index(one.label)] for row, one in zip(logs, examples, strict=True)) / 4
    assert objective.outputs == outputs
    assert objective.loss(scores, own).item() == pytest.approx(expected)
