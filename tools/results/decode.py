"""Dataclasses from plain JSON data and back. The types of the fields say what must stand where.

A field may be str, int, float, bool, `Any`, a literal, a dataclass, `tuple[X, ...]`, `tuple[X, Y]`, `dict[str, X]`, or a union of
one of these with None. Names that the dataclass does not have are ignored. `field(metadata={"name": ...})` gives the name in JSON
where that is no Python name.
"""

from __future__ import annotations

import dataclasses
import math
import types
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_NAMES: dict[Any, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


class DecodeError(ValueError):
    """Data that is not what a dataclass holds. The text names the place: `cases[3].entries.native.time: missing`."""


def decode(kind: type[T], value: Any, place: str = "") -> T:
    """Make the dataclass `kind` of the object `value`. Raises `DecodeError`.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Size:
    ...     tokens: int
    ...     heads: int = 8
    >>> decode(Size, {"tokens": 4096, "note": "ignored"})
    Size(tokens=4096, heads=8)
    >>> decode(Size, {"tokens": "many"})
    Traceback (most recent call last):
    dilkit.tools.results.decode.DecodeError: tokens: 'many' where a whole number is needed
    """
    record: Any = kind
    fields, data = {}, _needed(dict, value, place)
    for field, name, hint in _fields(record):
        inner = f"{place}.{name}" if place else name
        if name in data:
            fields[field.name] = _decode(hint, data[name], inner)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise DecodeError(f"{inner}: missing")
    try:
        return kind(**fields)
    except ValueError as error:
        raise DecodeError(f"{place or 'the file'}: {error}") from None


def encode(value: Any) -> Any:
    """Return plain data of `value`, plain data with dataclasses in it; fields that are None by default are left out.

    >>> encode({"sizes": (1, 2)})
    {'sizes': [1, 2]}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field, name, getattr(value, field.name)) for field, name, _ in _fields(type(value)))
        return {name: encode(found) for field, name, found in fields if found is not None or field.default is not None}
    if isinstance(value, dict):
        return {name: encode(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(inner) for inner in value]
    return value


@cache
def _fields(record: Any) -> list[tuple[dataclasses.Field[Any], str, Any]]:
    """Return (field, its name in JSON, its type) of each field that the constructor takes."""
    hints = get_type_hints(record)
    fields = [field for field in dataclasses.fields(record) if field.init]
    return [(field, field.metadata.get("name", field.name), hints[field.name]) for field in fields]


def _decode(hint: Any, value: Any, place: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return None if value is None else _decode(inner[0], value, place)
    if origin is Literal:
        if value not in inner:
            raise _mismatch(f"one of {', '.join(map(repr, inner))}", value, place)
        return value
    if origin is dict:
        return {name: _decode(inner[1], one, f"{place}.{name}") for name, one in _needed(dict, value, place).items()}
    if origin is tuple:
        hints = [inner[0]] * len(_needed(list, value, place)) if inner[1:] == (...,) else list(inner)
        if len(hints) != len(_needed(list, value, place)):
            raise DecodeError(f"{place}: a list of {len(value)} where {len(hints)} are needed")
        return tuple(_decode(each, one, f"{place}[{i}]") for i, (each, one) in enumerate(zip(hints, value, strict=True)))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return decode(hint, value, place)
    if hint is float and type(value) is int:
        value = float(value) if abs(value) < 2**1000 else math.inf
    if hint is float and not math.isfinite(_needed(float, value, place)):
        raise _mismatch("a finite number", value, place)
    return _needed(hint, value, place)


def _needed(kind: Any, value: Any, place: str) -> Any:
    if type(value) is not kind:
        raise _mismatch(_NAMES[kind], value, place)
    return value


def _mismatch(what: str, value: Any, place: str) -> DecodeError:
    shown = _NAMES[type(value)] if isinstance(value, (list, dict)) else repr(value)
    return DecodeError(f"{place or 'the file'}: {shown:.60} where {what} is needed")
