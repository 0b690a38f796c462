"""Checks of arguments, with errors that name the argument, its value, the limit and the way out."""

from __future__ import annotations

import operator
from typing import Any


def integer(name: str, value: Any, at_least: int | None = None) -> int:
    """`value` as an int. Raises TypeError for bools and non-integers, ValueError below `at_least`."""
    if isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is a bool; an integer is needed")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; an integer is needed") from None
    if at_least is not None and number < at_least:
        raise ValueError(f"{name}={number} must be at least {at_least}")
    return number


def one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `known`."""
    if value not in known:
        raise ValueError(f"{name}={value!r} is not known; choose from {', '.join(map(repr, known))}")
