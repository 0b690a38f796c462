"""What the figures of the suite of token orders should be, and how they are read out of its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from dilkit.tools.bench.orders.implementations import STORE_LOOP
from dilkit.tools.bench.orders.record import OURS, OrderCase, OrdersResult, size
from dilkit.tools.bench.target import Target, Values

PACKAGES = ("numpy-hilbert-curve", "hilbertcurve", "hilbertsfc")
NS = " ns/point"
Read = Callable[[OrdersResult], Values]


def _of(read: Callable[[OrderCase], float | None], **fields: Any) -> Read:
    """What is read of the cases that have these fields, by their title, or in short where the fields say the rest."""

    def values(result: OrdersResult) -> Values:
        cases = [case for case in result.cases if all(getattr(case, name) == value for name, value in fields.items())]
        return {case.short if fields else case.title: value for case in cases if (value := read(case)) is not None}

    return values


def _ns(**fields: Any) -> Read:
    """Nanoseconds a point of dilkit's."""
    return _of(lambda case: case.entries[OURS].ns_per_point, **fields)


def _warm(result: OrdersResult) -> Values:
    return {size(row.shape): 1e6 * row.time.median_s for row in result.warm if row.time}


def _over_dilkit(name: str) -> Target[OrdersResult]:
    read, missing = _of(lambda case: case.over(name)), partial(_absent, name)
    return Target(f"time of {name} over dilkit's, the least of all rows", 1.0, None, read, missing=missing)


def _absent(name: str, result: OrdersResult) -> str | None:
    return next((package.absent for package in result.packages if package.name == name), "not looked for")


def _near(rate: int, result: OrdersResult) -> Values:
    """Of the Hilbert curve, to the digits in which its limits are given."""
    return {size(row.shape): round(row.nearest_kept["hilbert"][str(rate)].mean, 2) for row in result.locality}


_STORES = _of(lambda case: case.over(OURS, STORE_LOOP), grid="large", dtype="int32")
_HILBERT: tuple[Target[OrdersResult], ...] = (
    Target("2-D Hilbert, 1024 x 1024", 0.15, 0.08, _ns(grid="square", dtype="int32"), NS),
    Target("2-D Hilbert, 4096 x 4096", 0.25, 0.15, _ns(grid="large", dtype="int32"), NS),
    Target("the same, in units of a store loop into the same array", 2.0, 1.2, _STORES),
    Target("3-D Hilbert, 128 x 128 x 128", 0.2, 0.1, _ns(grid="cube", dtype="int32"), NS),
    Target("generalised Hilbert, 1920 x 1080", 0.35, 0.2, _ns(grid="frame", dtype="int32"), NS),
    Target("generalised Hilbert, 33 x 45 x 80", 1.0, 0.3, _ns(grid="video", dtype="int32"), NS),
    Target("encode, random 2-D points", 1.5, 0.9, _ns(what="encode", ndim=2), NS),
    Target("decode, random 2-D points", 1.0, 0.6, _ns(what="decode", ndim=2), NS),
    Target("encode, random 3-D points", 3.0, 2.0, _ns(what="encode", ndim=3), NS),
    Target("decode, random 3-D points", 3.0, 2.0, _ns(what="decode", ndim=3), NS),
    Target("a warm order(...), from the cache", 5.0, None, _warm, " us"),
    Target("nearest kept key, keeping every 4th", 0.85, 0.84, partial(_near, 4), " cells"),
    Target("nearest kept key, keeping every 8th", 1.10, 1.09, partial(_near, 8), " cells"),
    Target("nearest kept key, keeping every 16th", 1.77, 1.76, partial(_near, 16), " cells"),
)
TARGETS: tuple[Target[OrdersResult], ...] = (
    *(replace(target, lower=True) for target in _HILBERT),
    *map(_over_dilkit, PACKAGES),
)
