"""Products of parameters of which the default run takes a part: every two values that can meet, meet there."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[Any, ...]


def every_pair(*axes: Iterable[Any], mark: Any = pytest.mark.slow) -> list[Any]:
    """The product of `axes` as parameters, in its order: rows that no pair of values needs are left to `mark`."""
    rows = list(product(*(list(axis) for axis in axes)))
    chosen = covering([tuple(enumerate(map(id, row))) for row in rows])
    return [pytest.param(*row, marks=[] if at in chosen else [mark]) for at, row in enumerate(rows)]


def covering(rows: list[Row]) -> set[int]:
    """Which of `rows` have every pair of values that any of them has; chosen greedily, so the same everywhere."""
    left = [set(combinations(row, 2)) for row in rows]
    chosen: set[int] = set()
    while any(left):
        best = max(range(len(rows)), key=lambda at: len(left[at]))
        chosen.add(best)
        found = left[best]
        left = [pairs - found for pairs in left]
    return chosen
