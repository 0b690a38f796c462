"""Dataclasses from plain JSON data and back: the types of the fields decide what must stand where.

A field may be str, int, float, bool, `Any`, a dataclass, `tuple[X, ...]`, `tuple[X, Y]`, `dict[str, X]`, or a union of one of
these with None. Names that the dataclass does not have are ignored.
"""

import dataclasses
import math
import types
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_NAMES: dict[Any, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}
_hints = cache(get_type_hints)


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
    for field in dataclasses.fields(record):
        inner = f"{place}.{field.name}" if place else field.name
        if field.name in data:
            fields[field.name] = _decode(_hints(record)[field.name], data[field.name], inner)
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
        fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {field.name: encode(one) for field, one in fields if one is not None or field.default is not None}
    if isinstance(value, dict):
        return {name: encode(inner) for name, inner in value.items()}
    return [encode(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _decode(hint: Any, value: Any, place: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return None if value is None else _decode(inner[0], value, place)
    if origin is dict:
        return {name: _decode(inner[1], one, f"{place}.{name}") for name, one in _needed(dict, value, place).items()}
    if origin is tuple:
        count = len(_needed(list, value, place))
        hints = [inner[0]] * count if inner[1:] == (...,) else inner
        if len(hints) != count:
            raise DecodeError(f"{place}: a list of {count} where {len(hints)} are needed")
        return tuple(_decode(each, one, f"{place}[{i}]") for i, (each, one) in enumerate(zip(hints, value, strict=True)))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return decode(hint, value, place)
    if hint is float and type(value) is int:
        value = float(value) if abs(value) < 2**1000 else math.inf
    if hint is float and not math.isfinite(_needed(float, value, place)):
        raise DecodeError(f"{place}: {value} where a finite number is needed")
    return _needed(hint, value, place)


def _needed(kind: Any, value: Any, place: str) -> Any:
    if type(value) is not kind:
        shown = _NAMES[type(value)] if isinstance(value, (list, dict)) else repr(value)
        raise DecodeError(f"{place or 'the file'}: {shown:.60} where {_NAMES[kind]} is needed")
    return value
