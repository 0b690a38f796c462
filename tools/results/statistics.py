"""How sure a figure is: bootstrap intervals of a median and of a ratio of medians. Equal samples have equal intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000
LEAST = 3
"""Fewer samples than these say nothing about how much they vary."""
_AT_ONCE = 2_000_000
"""Numbers drawn at a time: long lists of samples are resampled in parts."""

Interval = tuple[float, float]
Array = Any


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE, resamples: int = RESAMPLES) -> Interval:
    """Where the median of `samples` lies with this confidence: quantiles of the medians of `resamples` resampled lists.

    Of fewer than three samples, the least and the largest. Raises ValueError for no samples and for a confidence that is no
    share.
    """
    values = _checked(samples, "samples", confidence)
    if len(values) < LEAST:
        return float(values.min()), float(values.max())
    return _between(_medians(values, resamples, seed=0), confidence)


def ratio_interval(
    above: Sequence[float], below: Sequence[float], confidence: float = CONFIDENCE, resamples: int = RESAMPLES
) -> Interval:
    """Where median(above) / median(below) lies with this confidence, each list resampled by itself.

    Of fewer than three samples, every ratio that they allow. Raises ValueError as `median_interval`, and for samples of
    `below` that are not positive.
    """
    over, under = _checked(above, "above", confidence), _checked(below, "below", confidence)
    if under.min() <= 0:
        raise ValueError(f"below: {under.min()} among the samples; a ratio needs positive ones")
    medians = [_medians(over, resamples, seed=0), _medians(under, resamples, seed=1)]
    if min(len(over), len(under)) < LEAST:
        ends = [_ends(values, found) for values, found in zip((over, under), medians, strict=True)]
        return float(ends[0].min() / ends[1].max()), float(ends[0].max() / ends[1].min())
    return _between(medians[0] / medians[1], confidence)


def middle(samples: Sequence[float]) -> float:
    """The median."""
    return float(np.median(samples))


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """median(above) / median(below)."""
    return float(np.median(above) / np.median(below))


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of the least-squares line through (log size, log value). Raises ValueError for fewer than two sizes."""
    if len(set(sizes)) < 2 or len(sizes) != len(values):
        raise ValueError(f"sizes={list(sizes)}, values={list(values)}: values at two different sizes at least are needed")
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def _checked(samples: Sequence[float], name: str, confidence: float) -> Array:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}: a share between 0 and 1 is needed, such as {CONFIDENCE}")
    values = np.asarray(samples, dtype=np.float64)
    if not values.size:
        raise ValueError(f"{name}: no samples; one at least is needed")
    return values


def _medians(values: Array, resamples: int, seed: int) -> Array:
    """The medians of `resamples` lists drawn from `values` with replacement."""
    rng, count = np.random.default_rng(seed), len(values)
    at_once = max(1, _AT_ONCE // count)
    parts = [min(at_once, resamples - start) for start in range(0, resamples, at_once)]
    return np.concatenate([np.median(values[rng.integers(0, count, (rows, count))], axis=1) for rows in parts])


def _ends(values: Array, medians: Array) -> Array:
    return values if len(values) < LEAST else medians


def _between(found: Array, confidence: float) -> Interval:
    low, high = np.quantile(found, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
