"""AUROC, C-index and their intervals, and Cox's partial likelihood, against their definitions."""

import math
import sys
from itertools import product

import pytest
import torch
from helpers.slide_tables import cohort, tiny_encoder

from dilkit.integrations.gigapath.finetuning import Settings, finetune, metrics
from dilkit.integrations.gigapath.finetuning.metrics import auroc, auroc_interval, c_index, c_index_interval
from dilkit.integrations.gigapath.finetuning.training import Objective, cox_loss


def needs_torchmetrics():
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed (pip install dilkit[finetune])")


def patients(n, distinct=6):
    generator = torch.Generator().manual_seed(n)
    risks = torch.randint(distinct, (n,), generator=generator).double()
    times = (risks.flip(0) + torch.randint(distinct, (n,), generator=generator)).double()
    return risks, times, torch.rand(n, generator=generator) < 0.6


def harrell(risks, times, events):
    right, pairs = 0.0, 0
    for i, j in product(range(len(risks)), repeat=2):
        if events[i] and (times[i] < times[j] or (times[i] == times[j] and not events[j])):
            pairs += 1
            right += 1.0 if risks[i] > risks[j] else 0.5 if risks[i] == risks[j] else 0.0
    return right / pairs


def test_the_c_index_is_that_of_the_definition_if_there_is_a_pair():
    for n in (5, 12, 30):
        assert c_index(*patients(n)) == pytest.approx(harrell(*patients(n)), abs=1e-12)
    same = torch.zeros(2), torch.ones(2), torch.tensor([True, True])
    assert c_index(*same) is c_index_interval(*same, 5, 0) is None


def test_intervals_are_of_whole_patients():
    """One patient has all slides but two: the interval of the mean is as wide as patients differ."""
    x = torch.tensor([0.0, 1.0, *[0.5] * 8])
    interval = metrics.bootstrap(lambda rows: x[rows].mean().item(), ["a", "b", *"c" * 8], resamples=400, seed=0)
    assert (interval.value, interval.low, interval.high, interval.resamples) == (0.5, 0.0, 1.0, 400)
    interval = metrics.bootstrap(lambda rows: None if (rows == 0).all() else 0.25, ["a", "b"], resamples=200, seed=0)
    assert (interval.low, interval.high) == (0.25, 0.25)
    assert 100 < interval.resamples < 200


def test_the_interval_of_a_c_index_is_that_of_patients_drawn_again():
    whole = patients(9)
    torch.rand(1)  # the global generator is another one
    interval = c_index_interval(*whole, resamples=60, seed=0)
    drawn = torch.randint(9, (60, 9), generator=torch.Generator().manual_seed(0))
    values = [c_index(*(x[rows] for x in whole)) for rows in drawn]
    defined = torch.tensor([one for one in values if one is not None], dtype=torch.float64)
    assert interval.resamples == len(defined)
    assert (interval.low, interval.high) == pytest.approx(defined.quantile(torch.tensor([0.025, 0.975]).double()).tolist())
    assert interval.low < interval.value == c_index(*whole) < interval.high


def test_margins_tell_probabilities_near_1_apart():
    scores = torch.tensor([[0.0, 50.0], [0.0, 60.0]], dtype=torch.float64)
    assert scores.softmax(dim=1)[0, 1] == scores.softmax(dim=1)[1, 1]
    assert torch.equal(metrics.margins(scores)[:, 1], torch.tensor([50.0, 60.0], dtype=torch.float64))
    three = torch.randn(4, 3, dtype=torch.float64)
    assert torch.allclose(metrics.margins(three).sigmoid(), three.softmax(dim=1))


def test_auroc_is_a_share_of_pairs():
    needs_torchmetrics()
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-4, 5, (40,), generator=generator).double() * 100
    positive = torch.rand(40, generator=generator) < 0.4
    pairs = scores[positive][:, None] - scores[~positive]
    assert auroc(scores, positive) == pytest.approx(((pairs > 0).double() + 0.5 * (pairs == 0)).mean().item(), abs=1e-6)
    curve = metrics.roc("x", scores, positive)
    assert curve.points[0] == (0.0, 0.0)
    assert curve.points[-1] == (1.0, 1.0)


def test_auroc_of_three_classes_is_the_mean_of_each_against_the_others():
    needs_torchmetrics()
    scores, targets = torch.randn(30, 3, dtype=torch.float64), torch.arange(30) % 3
    names = [str(i // 2) for i in range(30)]
    single = [auroc_interval(scores, targets, [one], names, 50, 0) for one in range(3)]
    whole = auroc_interval(scores, targets, range(3), names, 50, 0)
    assert whole.value == pytest.approx(sum(one.value for one in single if one) / 3)
    assert whole.low <= whole.value <= whole.high
    assert auroc_interval(scores, torch.zeros(30, dtype=torch.int64), [0], names, 50, 0) is None


def test_classes_are_judged(tmp_path):
    needs_torchmetrics()
    labels, files = cohort(tmp_path / "slides", 24)
    settings = Settings(epochs=2, accumulate=6, base_rate=0.1, resamples=30)
    record = finetune(labels, files, tiny_encoder(), tmp_path / "out", settings)
    held_out = record.judged["test"]
    assert held_out.auroc.low <= held_out.auroc.value <= held_out.auroc.high
    assert [one.label for one in held_out.roc] == ["b"]
    assert held_out.c_index is None
    assert all(sum(one.probabilities) == pytest.approx(1) for one in record.predictions)
    shown = [(one.probabilities[1], one.label == "b") for one in record.predictions if one.split == "test"]
    scores, positive = (torch.tensor(column) for column in zip(*shown, strict=True))
    assert auroc(scores, positive) == pytest.approx(held_out.auroc.value)


def test_what_is_missing_is_said_before_training(tmp_path, monkeypatch):
    labels, files = cohort(tmp_path / "slides")
    for name in [name for name in sys.modules if name.startswith("torchmetrics")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(ImportError, match=r"AUROC needs torchmetrics.*pip install 'dilkit\[finetune\]'; survival needs none"):
        finetune(labels, files, tiny_encoder(), tmp_path / "out", Settings())
    assert not (tmp_path / "out").exists()


def by_definition(scores, times, events):
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
def test_the_loss_is_that_of_the_definition(distinct, share):
    generator = torch.Generator().manual_seed(distinct)
    scores = torch.randn(17, dtype=torch.float64, generator=generator)
    times = torch.randint(distinct, (17,), generator=generator).double()
    events = torch.rand(17, generator=generator) <= share
    events[0] = True
    loss = cox_loss(scores, times, events)
    assert loss.item() == pytest.approx(by_definition(scores.tolist(), times.tolist(), events.tolist()), rel=1e-12)


@pytest.mark.parametrize("scores", [torch.tensor([800.0, -800.0, 0.0]), torch.zeros(3)])
def test_extreme_scores_and_those_without_an_event(scores):
    scores.requires_grad_()
    loss = cox_loss(scores, torch.tensor([1.0, 1.0, 2.0]), torch.tensor([True, True, False]))
    (gradient,) = torch.autograd.grad(loss, scores)
    assert math.isfinite(loss.item())
    assert bool(gradient.isfinite().all())
    loss = cox_loss(scores, torch.arange(3.0), torch.zeros(3, dtype=torch.bool))
    assert loss.item() == 0
    assert torch.equal(*torch.autograd.grad(loss, scores), torch.zeros(3))


@pytest.mark.parametrize(("survival", "outputs"), [(True, 1), (False, 2)])
def test_targets_are_those_of_the_table(tmp_path, survival, outputs):
    labels, _ = cohort(tmp_path, survival=survival)
    objective = Objective(labels)
    scores, own = torch.randn(4, outputs, dtype=torch.float64), [7, 2, 5, 9]
    examples = [labels.examples[i] for i in own]
    if survival:
        expected = by_definition(scores[:, 0].tolist(), [one.time for one in examples], [one.event for one in examples])
    else:
        logs = scores.log_softmax(dim=1).tolist()
        expected = -sum(row["ab".index(one.label)] for row, one in zip(logs, examples, strict=True)) / 4
    assert objective.outputs == outputs
    assert objective.loss(scores, own).item() == pytest.approx(expected)
