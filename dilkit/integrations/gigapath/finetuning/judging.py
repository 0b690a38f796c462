"""Scores of slides as predictions, and how right those of each split are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dilkit.integrations.gigapath.finetuning.labels import SPLITS, Example, Labels
from dilkit.integrations.gigapath.finetuning.metrics import auroc_interval, c_index_interval, margins, roc
from dilkit.integrations.gigapath.finetuning.record import Judgement, Prediction
from dilkit.integrations.gigapath.finetuning.settings import Settings
from dilkit.integrations.gigapath.finetuning.splits import Splits


def predictions(labels: Labels, splits: Splits, scores: Tensor) -> tuple[Prediction, ...]:
    """What the scores `(slides, outputs)` say of all slides that are in a split, in the order of the file."""
    side = {index: name for name in SPLITS for index in getattr(splits, name)}
    results = []
    for index in sorted(side):
        one, row = labels.examples[index], scores[index]
        values: dict[str, Any] = dict(line=one.line, split=side[index], label=one.label, time=one.time, event=one.event)
        if labels.is_survival:
            values |= dict(risk=row.item())
        else:
            values |= dict(probabilities=tuple(row.softmax(dim=0).tolist()))
        results.append(Prediction(slide=one.slide, patient=one.patient, **values))
    return tuple(results)


def judged(labels: Labels, splits: Splits, scores: Tensor, settings: Settings) -> dict[str, Judgement]:
    """How right the scores of each split are, of those that have slides."""
    judge = _judged_survival if labels.is_survival else _judged_classes
    by_split = {}
    for name in SPLITS:
        if indices := list(getattr(splits, name)):
            by_split[name] = judge([labels.examples[i] for i in indices], scores[indices], labels.classes, settings)
    return by_split


def _judged_classes(examples: Sequence[Example], scores: Tensor, classes: Sequence[str], settings: Settings) -> Judgement:
    targets = torch.tensor([classes.index(one.label) for one in examples if one.label is not None])
    patients = [one.patient for one in examples]
    numbers = range(1 if len(classes) == 2 else 0, len(classes))
    drawing = settings.resamples, settings.seed
    whole = auroc_interval(scores, targets, numbers, patients, *drawing)
    single = {classes[n]: auroc_interval(scores, targets, [n], patients, *drawing) for n in numbers} if len(numbers) > 1 else {}
    by_margin, curves = margins(scores), []
    for n in numbers:
        positive = targets == n
        if bool(positive.any()) and not bool(positive.all()):
            curves.append(roc(classes[n], by_margin[:, n], positive))
    by_class = {name: interval for name, interval in single.items() if interval}
    counts = len(examples), len(set(patients))
    return Judgement(slides=counts[0], patients=counts[1], auroc=whole, by_class=by_class, roc=tuple(curves))


def _judged_survival(examples: Sequence[Example], scores: Tensor, classes: Sequence[str], settings: Settings) -> Judgement:
    risks: dict[str, list[float]] = defaultdict(list)
    of_patient: dict[str, Example] = {}
    for one, risk in zip(examples, scores[:, 0].tolist(), strict=True):
        risks[one.patient].append(risk)
        of_patient[one.patient] = one
    mean = torch.tensor([sum(values) / len(values) for values in risks.values()], dtype=torch.float64)
    times = torch.tensor([one.time for one in of_patient.values()], dtype=torch.float64)
    events = torch.tensor([bool(one.event) for one in of_patient.values()])
    interval = c_index_interval(mean, times, events, settings.resamples, settings.seed)
    return Judgement(slides=len(examples), patients=len(of_patient), c_index=interval)
