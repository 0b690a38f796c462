"""Checks of arguments, with errors that name the argument, its value, the limit and the way out."""

from __future__ import annotations

import math
import numbers
import operator
import sys
from typing import Any


def integer(name: str, value: Any, at_least: int | None = None) -> int:
    """`value` as an int. Raises TypeError for bools and non-integers, ValueError below `at_least`."""
    number = value if type(value) is int else _converted(name, value)
    if at_least is not None and number < at_least:
        raise ValueError(f"{name}={number} must be at least {at_least}")
    return number


def _converted(name: str, value: Any) -> int:
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):  # numpy's and torch's as well
        raise TypeError(f"{name}={value!r} is a bool; an integer is needed")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; an integer is needed") from None


def boolean(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is True or False."""
    if value is not True and value is not False:
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; True or False is needed")


def one_of(name: str, value: Any, known: tuple[str, ...], error: type[ValueError] = ValueError) -> None:
    """Raise `error` unless `value` is one of `known`."""
    if not isinstance(value, str) or value not in known:
        raise error(f"{name}={value!r} is not known; choose from {', '.join(map(repr, known))}")


def real(name: str, value: Any, above: float | None = None) -> float:
    """`value` as a float. Raises TypeError for bools and non-numbers, ValueError unless finite and greater than `above`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; a number is needed")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for a float; it must be finite") from None
    if not (-math.inf if above is None else above) < number < math.inf:
        raise ValueError(f"{name}={number} must be finite" + ("" if above is None else f" and greater than {above:g}"))
    return number


def not_distributed(name: str, x: Any) -> None:
    """Raise TypeError if `x` is a DTensor of torch: its shape is that of the whole, its rows are those of a rank."""
    tensors = sys.modules.get("torch.distributed.tensor")  # which no DTensor is without
    if tensors is not None and isinstance(x, tensors.DTensor):
        raise TypeError(f"{name} is a DTensor of shape {tuple(x.shape)}; the rows of this rank are needed, {name}.to_local()")


def probability(name: str, value: Any) -> float:
    """`value` as a float. Raises TypeError for bools and non-numbers, ValueError unless it is at least 0 and less than 1."""
    number = real(name, value)
    if not 0 <= number < 1:
        raise ValueError(f"{name}={number} must be at least 0 and less than 1; 1 would leave no weight")
    return number


def visible(text: str, most: int | None = None) -> str:
    """`text` in one line, with what a terminal would obey instead of showing written as an escape; `most` characters of it."""
    cut = text if most is None or len(text) <= most else f"{text[:most]}..."
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in cut)
