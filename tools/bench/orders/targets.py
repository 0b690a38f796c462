"""What the figures of the suite of token orders should be, and how they are read out of its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from dilkit.tools.bench.target import Target, Values
from dilkit.tools.results.kinds.orders import OURS, OrdersResult, size

STORE_LOOP = "store loop"
PACKAGES = ("numpy-hilbert-curve", "hilbertcurve", "hilbertsfc")
NS = " ns/point"
Read = Callable[[OrdersResult], Values]


def _known(pairs: Iterable[tuple[str, float | None]]) -> Values:
    return {name: value for name, value in pairs if value is not None}


def _permutation(grid: str) -> Read:
    """Nanoseconds a point in int32."""

    def read(result: OrdersResult) -> Values:
        cases = (case for case in result.permutations if (case.grid, case.dtype) == (grid, "int32"))
        return _known((size(case.shape), case.entries[OURS].ns_per_point) for case in cases)

    return read


def _over_store_loop(result: OrdersResult) -> Values:
    cases = (case for case in result.permutations if (case.grid, case.dtype) == ("large", "int32"))
    return _known((size(case.shape), case.over(OURS, STORE_LOOP)) for case in cases)


def _points(what: str, ndim: int) -> Read:
    def read(result: OrdersResult) -> Values:
        cases = (case for case in result.points if (case.what, case.ndim) == (what, ndim))
        return _known((f"{case.bits} bits", case.entries[OURS].ns_per_point) for case in cases)

    return read


def _warm(result: OrdersResult) -> Values:
    return {size(row.shape): 1e6 * row.time.median_s for row in result.warm}


def _package(name: str) -> Read:
    return lambda result: _known((case.title, case.over(name)) for case in result.cases)


def _absent(name: str, result: OrdersResult) -> str | None:
    return next((package.absent for package in result.packages if package.name == name), "not looked for")


def _near(rate: int) -> Read:
    """Of the Hilbert curve, to the digits in which its limits are given."""
    return lambda result: {size(row.shape): round(row.nearest_kept["hilbert"][str(rate)].mean, 2) for row in result.locality}


_HILBERT: tuple[Target[OrdersResult], ...] = (
    Target("2-D Hilbert, 1024 x 1024", 0.15, 0.08, _permutation("square"), NS),
    Target("2-D Hilbert, 4096 x 4096", 0.25, 0.15, _permutation("large"), NS),
    Target("the same, in units of a store loop into the same array", 2.0, 1.2, _over_store_loop),
    Target("3-D Hilbert, 128 x 128 x 128", 0.2, 0.1, _permutation("cube"), NS),
    Target("generalised Hilbert, 1920 x 1080", 0.35, 0.2, _permutation("frame"), NS),
    Target("generalised Hilbert, 33 x 45 x 80", 1.0, 0.3, _permutation("video"), NS),
    Target("encode, random 2-D points", 1.5, 0.9, _points("encode", 2), NS),
    Target("decode, random 2-D points", 1.0, 0.6, _points("decode", 2), NS),
    Target("encode, random 3-D points", 3.0, 2.0, _points("encode", 3), NS),
    Target("decode, random 3-D points", 3.0, 2.0, _points("decode", 3), NS),
    Target("a warm order(...), from the cache", 5.0, None, _warm, " us"),
    Target("nearest kept key, keeping every 4th", 0.85, 0.84, _near(4), " cells"),
    Target("nearest kept key, keeping every 8th", 1.10, 1.09, _near(8), " cells"),
    Target("nearest kept key, keeping every 16th", 1.77, 1.76, _near(16), " cells"),
)
TARGETS: tuple[Target[OrdersResult], ...] = (
    *(replace(target, lower=True) for target in _HILBERT),
    *(
        Target(f"time of {name} over dilkit's, the least of all rows", 1.0, None, _package(name), missing=partial(_absent, name))
        for name in PACKAGES
    ),
)
