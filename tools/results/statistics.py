"""Uncertainty of a figure: bootstrap intervals of a median and of a ratio of medians. Equal samples have equal intervals."""

from collections.abc import Sequence
from typing import Any

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000
LEAST = 3
"""Samples below which nothing is known about how much they vary."""
AT_ONCE = 2_000_000
"""Numbers drawn at a time: long lists of samples are resampled in parts."""

Interval = tuple[float, float]


def median_interval(samples: Sequence[float]) -> Interval:
    """Return the interval of the median of `samples`, by resampling; of fewer than three samples, the least and the largest."""
    medians = _medians(samples, seed=0)
    return _between(medians) if len(samples) >= LEAST else (float(medians.min()), float(medians.max()))


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Return the interval of median(above) / median(below), each list of positive samples resampled by itself.

    For fewer than three samples it holds every ratio that they allow.
    """
    over, under = _medians(above, seed=0), _medians(below, seed=1)
    if min(len(above), len(below)) < LEAST:
        return float(over.min() / under.max()), float(over.max() / under.min())
    return _between(over / under)


def _medians(samples: Sequence[float], seed: int) -> Any:
    """Return medians of lists drawn from `samples` with replacement; of too few, the samples themselves."""
    values, count = np.asarray(samples, dtype=np.float64), len(samples)
    if count < LEAST:
        return values
    rng, at_once = np.random.default_rng(seed), max(1, AT_ONCE // count)
    parts = [min(at_once, RESAMPLES - start) for start in range(0, RESAMPLES, at_once)]
    return np.concatenate([np.median(values[rng.integers(0, count, (rows, count))], axis=1) for rows in parts])


def _between(medians: Any) -> Interval:
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
