"""Shapes: what must stand where in a result file. A shape is called with a value and its place, and says what is wrong, or None.

Numbers are bounded, so that nothing computed from values of the right shape overflows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Shape = Callable[[Any, str], str | None]

LARGEST = 2.0**62
MOST_ITEMS, MOST_NAMES = 20_000, 1000
"""Of a list and of an object: what a report tells of more would take long, and nobody would read it."""
SHOWN = 40
"""Characters of a wrong value that are shown."""


def anything(value: Any, place: str) -> str | None:
    """Whatever it is."""
    return None


def text(value: Any, place: str) -> str | None:
    """A text."""
    return None if isinstance(value, str) else _not("a text", value, place)


def flag(value: Any, place: str) -> str | None:
    """True or false."""
    return None if isinstance(value, bool) else _not("true or false", value, place)


def number(low: float, high: float) -> Shape:
    """A number from `low` to `high`, both included."""

    def shape(value: Any, place: str) -> str | None:
        able = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
        return None if able else _not(f"a number from {low:g} to {high:g}", value, place)

    return shape


def whole(low: int = 0, high: int = 2**63) -> Shape:
    """A whole number from `low` to `high`, both included."""

    def shape(value: Any, place: str) -> str | None:
        able = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return None if able else _not(f"a whole number from {low} to {high}", value, place)

    return shape


def maybe(inner: Shape) -> Shape:
    """That, or null."""
    return lambda value, place: None if value is None else inner(value, place)


def listed(inner: Shape, least: int = 0, most: int = MOST_ITEMS) -> Shape:
    """A list of `least` to `most` of these."""

    def shape(value: Any, place: str) -> str | None:
        if not isinstance(value, list):
            return _not("a list", value, place)
        if not least <= len(value) <= most:
            return f"{place}: a list of {len(value)}, where {least} to {most} are needed"
        return _first(inner(item, f"{place}[{i}]") for i, item in enumerate(value))

    return shape


def named(inner: Shape, least: int = 0) -> Shape:
    """An object of `least` or more of these, a thousand at most, under whatever names."""

    def shape(value: Any, place: str) -> str | None:
        if not isinstance(value, dict):
            return _not("an object", value, place)
        if not least <= len(value) <= MOST_NAMES:
            return f"{place}: an object of {len(value)}, where {least} to {MOST_NAMES} are needed"
        return _first(inner(item, _under(place, name)) for name, item in value.items())

    return shape


def fields(needed: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None) -> Shape:
    """An object with all of `needed`, and with what it has of `optional`; further names may stand beside them."""
    known = {**needed, **(optional or {})}

    def shape(value: Any, place: str) -> str | None:
        if not isinstance(value, dict):
            return _not("an object", value, place)
        if missing := [name for name in needed if name not in value]:
            return f"{place}: {', '.join(missing)} missing"
        return _first(inner(value[name], _under(place, name)) for name, inner in known.items() if name in value)

    return shape


def where(inner: Shape, holds: Callable[[Any], bool], what: str) -> Shape:
    """That, of which something more `holds`: `what` says it."""

    def shape(value: Any, place: str) -> str | None:
        return inner(value, place) or (None if holds(value) else _not(what, value, place))

    return shape


def chosen(decide: Callable[[dict[str, Any]], Shape]) -> Shape:
    """An object whose shape depends on what it says of itself."""
    return lambda value, place: decide(value)(value, place) if isinstance(value, dict) else _not("an object", value, place)


def matching(pattern: str, what: str) -> Shape:
    """A text all of which matches the regular expression; `what` says what that is."""
    compiled = re.compile(pattern)
    return where(text, lambda value: compiled.fullmatch(value) is not None, what)


def _first(complaints: Any) -> str | None:
    return next((found for found in complaints if found), None)


def _under(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _not(what: str, value: Any, place: str) -> str:
    """The complaint, with the beginning of the value: it may be of any size."""
    shown = {list: "a list", dict: "an object"}.get(type(value)) or repr(value)
    return f"{place}: {shown if len(shown) <= SHOWN else shown[:SHOWN] + '...'} where {what} is needed"
