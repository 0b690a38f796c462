"""A matrix of bools as few rectangles."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]


class Rectangle(NamedTuple):
    """The rows `top .. bottom - 1` in the columns `left .. right - 1`."""

    top: int
    bottom: int
    left: int
    right: int


def runs(bools: Bools) -> list[tuple[int, int]]:
    """Where bools are true: `(start, stop)`, ascending and apart.

    >>> runs(np.array([True, False, True, True]))
    [(0, 1), (2, 4)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([False], bools, [False])).astype(np.int8)))
    return [(start, stop) for start, stop in edges.reshape(-1, 2).tolist()]


def rectangles(seen: Bools) -> list[Rectangle]:
    """Rectangles that have each true element of `seen` `(rows, columns)` once, those of most rows first.

    >>> rectangles(np.array([[True, True], [True, False], [True, False]]))
    [Rectangle(top=0, bottom=3, left=0, right=1), Rectangle(top=0, bottom=1, left=1, right=2)]
    """
    by_rows = _strips(seen)
    by_columns = [Rectangle(top, bottom, left, right) for left, right, top, bottom in _strips(seen.T)]
    fewer = by_rows if len(by_rows) < len(by_columns) else by_columns
    return sorted(fewer, key=lambda one: one.top - one.bottom)


def _strips(seen: Bools) -> list[Rectangle]:
    """Rectangles of rows that are equal and follow each other."""
    used = np.flatnonzero(seen.any(1))
    if not len(used):
        return []
    changes = np.flatnonzero((seen[1:] != seen[:-1]).any(1)) + 1
    bounds = [0, *changes.tolist(), len(seen)]
    return [Rectangle(*band, *run) for band in pairwise(bounds) for run in runs(seen[band[0]])]
