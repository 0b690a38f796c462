"""Metrics of scores: AUROC and ROC curves, by torchmetrics, and Harrell's C-index; intervals by a bootstrap over patients."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dilkit.integrations.gigapath.finetuning.record import Interval, Roc

COVERED = 0.95


def torchmetrics_curves() -> Any:
    """Import torchmetrics' functions of classes. Raises ImportError saying what to install."""
    try:
        return importlib.import_module("torchmetrics.functional.classification")
    except ImportError as error:
        raise ImportError(
            f"AUROC needs torchmetrics, which cannot be imported ({error}): pip install 'dilkit[finetune]'; survival needs none"
        ) from None


def margins(scores: Tensor) -> Tensor:
    """Return the logit of each class's probability, `(n, classes)` like `scores`: it tells apart probabilities near 1."""
    classes = scores.shape[1]
    others = torch.stack([scores[:, [c for c in range(classes) if c != own]].logsumexp(dim=1) for own in range(classes)], dim=1)
    return scores - others


def auroc(scores: Tensor, positive: Tensor) -> float:
    """Return the chance that a positive slide has a higher score than another, ties counted half; `(n,)` both."""
    return float(torchmetrics_curves().binary_auroc(_ranks(scores), positive.long()))


def roc(label: str, scores: Tensor, positive: Tensor) -> Roc:
    false, true, _ = torchmetrics_curves().binary_roc(_ranks(scores), positive.long())
    return Roc(label, tuple(zip(false.tolist(), true.tolist(), strict=True)))


def _ranks(scores: Tensor) -> Tensor:
    """Return `scores` as equally spaced numbers from 0 to 1 in the same order: torchmetrics rounds others by a sigmoid."""
    values, places = torch.unique(scores, return_inverse=True)
    ranks: Tensor = (places + 0.5).double() / len(values)
    return ranks


def auroc_interval(
    scores: Tensor, targets: Tensor, classes: Sequence[int], patients: Sequence[str], resamples: int, seed: int
) -> Interval | None:
    """Return the mean AUROC of these classes, each against all others; None where a class, or all others, are missing.

    `scores` `(n, classes)`, `targets` and `patients` `(n,)`.
    """
    by_margin = margins(scores)

    def value(rows: Tensor) -> float | None:
        positive = [targets[rows] == one for one in classes]
        if any(bool(of.all()) or not bool(of.any()) for of in positive):
            return None
        return sum(auroc(by_margin[rows, one], of) for one, of in zip(classes, positive, strict=True)) / len(classes)

    return bootstrap(value, patients, resamples, seed)


def c_index(risks: Tensor, times: Tensor, events: Tensor) -> float | None:
    """Return Harrell's C: of all pairs that can be compared, the share in which who has the event first has the higher risk.

    All are `(n,)`. A pair can be compared where the earlier time is that of an event, which at the same time comes before an end
    of observation; two events at one time cannot. Equal risks count half. None without such a pair.
    """
    right, comparable = _pairs(risks, times, events)
    pairs = comparable.sum().item()
    return right.sum().item() / pairs if pairs else None


def _pairs(risks: Tensor, times: Tensor, events: Tensor) -> tuple[Tensor, Tensor]:
    """Return two matrices `(n, n)`: 1 for concordant pairs (0.5 for ties), and 1 for comparable ones, the earlier event first."""
    first = (times[:, None] < times) | ((times[:, None] == times) & ~events)
    comparable = (events[:, None] & first).double()
    right = (risks[:, None] > risks).double() + 0.5 * (risks[:, None] == risks)
    return right * comparable, comparable


def c_index_interval(risks: Tensor, times: Tensor, events: Tensor, resamples: int, seed: int) -> Interval | None:
    """Return Harrell's C of patients, `(n,)` each, with its interval as `bootstrap` has it; None without pairs.

    A patient drawn several times is no pair with itself: pairs are weighed by how often both were drawn.
    """
    whole = c_index(risks, times, events)
    if whole is None:
        return None
    drawn = torch.randint(len(risks), (resamples, len(risks)), generator=torch.Generator().manual_seed(seed))
    often = torch.zeros(drawn.shape, dtype=torch.float64).scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=torch.float64))
    right, pairs = (((often @ one) * often).sum(dim=1) for one in _pairs(risks, times, events))
    return _interval(whole, (right / pairs)[pairs > 0].tolist())


def bootstrap(value: Callable[[Tensor], float | None], patients: Sequence[str], resamples: int, seed: int) -> Interval | None:
    """Return `value` of all rows, and the bounds of 95% of its resamples; None where it is not defined.

    A resample draws as many patients as there are, with replacement, with all their rows. Those that `value` is not defined for
    are left out; with none left, the interval is that value.
    """
    whole = value(torch.arange(len(patients)))
    if whole is None:
        return None
    by_patient: dict[str, list[int]] = defaultdict(list)
    for row, patient in enumerate(patients):
        by_patient[patient].append(row)
    rows = list(by_patient.values())
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(resamples):
        drawn = torch.randint(len(rows), (len(rows),), generator=generator).tolist()
        one = value(torch.tensor([row for number in drawn for row in rows[number]]))
        if one is not None:
            values.append(one)
    return _interval(whole, values)


def _interval(whole: float, values: Sequence[float]) -> Interval:
    edges = torch.tensor([(1 - COVERED) / 2, (1 + COVERED) / 2], dtype=torch.float64)
    low, high = torch.tensor(values or [whole], dtype=torch.float64).quantile(edges).tolist()
    return Interval(whole, low, high, len(values))
