"""Checks of arguments, with errors that name the argument, its value, the limit and the way out."""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Collection, Mapping, Set
from typing import Any

MOST_SHOWN = 200
"""Characters of a value in the text of an error."""

LONGEST = 2**63 - 1
"""The most that an integer of 64 bits holds: no tensor is longer."""

SMALLEST_DROPOUT = 2**-32
"""The resolution of the random numbers by which weights are dropped."""


def shown(value: object) -> str:
    """Return `repr(value)` for the text of an error, cut to `MOST_SHOWN` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"<{type(value).__name__} that is too long to write>"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def check_type(name: str, value: object, kind: Any, needed: str) -> None:
    """Raise TypeError, which says what is `needed`, unless `value` is of a class `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}={shown(value)} is a {type(value).__name__}; {needed}")


def integer(name: str, value: Any, at_least: int | None = None) -> int:
    """Return `value` as an int. Raises TypeError for bools and non-integers, ValueError below `at_least`."""
    number: int = value
    if type(value) is not int:
        if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
            raise TypeError(f"{name}={shown(value)} is a bool; an integer is needed")
        try:
            number = operator.index(value)
        except TypeError:
            raise TypeError(f"{name}={shown(value)} is a {type(value).__name__}; an integer is needed") from None
    if not -LONGEST <= number <= LONGEST and (bits := number.bit_length()) > 128:  # which torch.compile is not asked of a size
        raise ValueError(f"{name} is an integer of about {int(bits * math.log10(2)) + 1:,} digits; at most 2**63 - 1 is needed")
    if at_least is not None and number < at_least:
        raise ValueError(f"{name}={number} must be at least {at_least}")
    return number


def integers(name: str, values: Any, at_least: int | None = None) -> list[int]:
    """Return the entries of a list, array or tensor as ints.

    Raises TypeError for a value without a length or an order, otherwise as `integer`.
    """
    items = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(items, (str, bytes, Set, Mapping)) or not isinstance(items, Collection):
        raise TypeError(f"{name}={shown(values)} is a {type(values).__name__}; a sequence of integers is needed, such as [0, 2]")
    return [integer(f"{name}[{i}]", value, at_least) for i, value in enumerate(items)]


def boolean(name: str, value: Any) -> bool:
    """Return `value`. Raise TypeError unless it is True or False."""
    if value is not True and value is not False:
        raise TypeError(f"{name}={shown(value)} is a {type(value).__name__}; True or False is needed")
    return bool(value)


def one_of(name: str, value: Any, known: tuple[str, ...], error: type[ValueError] = ValueError) -> None:
    """Raise `error` unless `value` is one of `known`."""
    if not isinstance(value, str) or value not in known:
        raise error(f"{name}={shown(value)} is not known; choose from {', '.join(map(repr, known))}")


def real(name: str, value: Any, above: float | None = None) -> float:
    """Return `value` as a float. Raises TypeError for bools and non-numbers, ValueError unless finite and above `above`."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise TypeError(f"{name}={shown(value)} is a {type(value).__name__}; a number is needed")
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
        raise TypeError(
            f"{name} is a DTensor of shape {tuple(x.shape)}; use {name}.to_local(), or dilkit.nn.HeadParallel for heads"
        )


def probability(name: str, value: Any) -> float:
    """Return `value` as a float. Raises as `real`, and ValueError unless 0 or at least `SMALLEST_DROPOUT` from 0 and 1."""
    if type(value) is float and value == 0:
        return value
    number = real(name, value)
    if not 0 <= number < 1:
        raise ValueError(f"{name}={number} must be at least 0 and less than 1; 1 would leave no weight")
    if number and not SMALLEST_DROPOUT <= number <= 1 - SMALLEST_DROPOUT:
        low, high = SMALLEST_DROPOUT, 1 - SMALLEST_DROPOUT
        raise ValueError(f"{name}={number} must be 0, or from 2**-32 = {low} to 1 - 2**-32 = {high}: random numbers have 32 bits")
    return number


def visible(text: str, most: int | None = None) -> str:
    """Return `text` in one line with control characters escaped, cut to `most` characters."""
    cut = text if most is None or len(text) <= most else f"{text[:most]}..."
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in cut)
