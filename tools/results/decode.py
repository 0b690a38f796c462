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
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from dilkit.tools.console.text import visible

T = TypeVar("T")
_PLAIN: dict[type, str] = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


class DecodeError(ValueError):
    """Data that is not what a dataclass holds. The text names the place: `cases[3].entries.native.time: missing`."""


def decode(kind: type[T], value: Any, place: str = "") -> T:
    """The dataclass `kind` made of the object `value`; raises `DecodeError`.

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
    if not isinstance(value, dict):
        raise _mismatch("an object", value, place)
    found, record = {}, cast(Any, kind)
    for field, name, hint in _fields(record):
        inner = f"{place}.{name}" if place else name
        if name in value:
            found[field.name] = _decode(hint, value[name], inner)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise DecodeError(f"{inner}: missing")
    try:
        return kind(**found)
    except ValueError as error:
        raise DecodeError(f"{place or 'the file'}: {error}") from None


def encode(value: Any) -> Any:
    """`value`, a dataclass or plain data with dataclasses in it, as plain data; fields that are None by default are left out.

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
    """(field, its name in JSON, its type) of each field that the constructor takes."""
    hints = get_type_hints(record)
    return [
        (field, field.metadata.get("name", field.name), hints[field.name]) for field in dataclasses.fields(record) if field.init
    ]


def _decode(hint: Any, value: Any, place: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return _printable(value)
    if origin in (Union, types.UnionType):
        return None if value is None and type(None) in inner else _decode(inner[0], value, place)
    if origin is Literal:
        return value if value in inner else _refuse(f"one of {', '.join(map(repr, inner))}", value, place)
    if origin is dict:
        return _decode_dict(inner[1], value, place)
    if origin is tuple:
        return _decode_tuple(inner, value, place)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return decode(hint, value, place)
    return _decode_plain(hint, value, place)


def _decode_dict(inner: Any, value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _mismatch("an object", value, place)
    return {visible(name): _decode(inner, found, f"{place}.{visible(name, 40)}") for name, found in value.items()}


def _decode_tuple(inner: tuple[Any, ...], value: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _mismatch("a list", value, place)
    hints = [inner[0]] * len(value) if inner[1:] == (...,) else list(inner)
    if len(hints) != len(value):
        raise DecodeError(f"{place}: a list of {len(value)} where {len(hints)} are needed")
    return tuple(_decode(hint, found, f"{place}[{i}]") for i, (hint, found) in enumerate(zip(hints, value, strict=True)))


def _decode_plain(hint: type[Any], value: Any, place: str) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if hint is float and (whole or isinstance(value, float)):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        return number if math.isfinite(number) else _refuse("a finite number", value, place)
    if type(value) is not hint:
        raise _mismatch(_PLAIN.get(hint, str(hint)), value, place)
    return visible(value) if hint is str else value


def _printable(value: Any) -> Any:
    """Data of any kind, its texts without what a terminal would obey."""
    if isinstance(value, dict):
        return {visible(name): _printable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_printable(inner) for inner in value]
    return visible(value) if isinstance(value, str) else value


def _refuse(what: str, value: Any, place: str) -> Any:
    raise _mismatch(what, value, place)


def _mismatch(what: str, value: Any, place: str) -> DecodeError:
    shown = "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else visible(repr(value), 60)
    return DecodeError(f"{place or 'the file'}: {shown} where {what} is needed")
