"""Lists of parameters of which the default run takes a part; `make test-all` takes the rest too."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def diagonal(*axes: Iterable[Any]) -> list[Any]:
    """The product of `axes`: every value of each axis in as few rows as can be, and the other rows are slow."""
    values = [list(axis) for axis in axes]
    longest = max(map(len, values))
    chosen = {tuple(k % len(axis) for axis in values) for k in range(longest)}
    places = product(*(range(len(axis)) for axis in values))
    return [_row([axis[i] for axis, i in zip(values, at, strict=True)], at in chosen) for at in places]


def every_nth(n: int, cases: Iterable[Any], first: int = 0) -> list[Any]:
    """Of `cases`, one in `n` from the `first` on; the others are slow."""
    return [_row([case], at % n == first) for at, case in enumerate(cases)]


def all_but(few: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Of `cases`, those that are not among `few`; these are slow."""
    left_out = list(few)
    return [_row([case], case not in left_out) for case in cases]


def _row(values: list[Any], by_default: bool) -> Any:
    return pytest.param(*values, marks=[] if by_default else [pytest.mark.slow])
