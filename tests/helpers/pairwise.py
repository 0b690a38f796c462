"""Lists of parameters of which the default run takes a part."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[Any, ...]


def every_pair(*axes: Iterable[Any], mark=pytest.mark.slow) -> list[Any]:
    """Return the product of `axes`; rows that no pair of values needs get `mark`."""
    rows = list(product(*(list(axis) for axis in axes)))
    chosen = covering([tuple(enumerate(map(id, row))) for row in rows])
    return [pytest.param(*row, marks=[] if at in chosen else [mark]) for at, row in enumerate(rows)]


def covering(rows: list[Row]) -> set[int]:
    left = [set(combinations(row, 2)) for row in rows]
    chosen: set[int] = set()
    while any(left):
        best = max(range(len(rows)), key=lambda at: len(left[at]))
        chosen.add(best)
        found = left[best]
        left = [pairs - found for pairs in left]
    return chosen


def diagonal(*axes: Iterable[Any]) -> list[Any]:
    """Return the product of `axes`: few rows with every value of each axis, and the others slow."""
    values = [list(axis) for axis in axes]
    longest = max(map(len, values))
    chosen = {tuple(k % len(axis) for axis in values) for k in range(longest)}
    places = product(*(range(len(axis)) for axis in values))
    return [_row([axis[i] for axis, i in zip(values, at, strict=True)], at in chosen) for at in places]


def every_nth(n: int, cases: Iterable[Any], first: int = 0) -> list[Any]:
    """Mark all but one in `n` as slow."""
    return [_row([case], at % n == first) for at, case in enumerate(cases)]


def all_but(few: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    left_out = list(few)
    return [_row([case], case not in left_out) for case in cases]


def _row(values: list[Any], by_default: bool):
    return pytest.param(*values, marks=[] if by_default else [pytest.mark.slow])
