"""What the figures of the suite of token orders should be, and what they are: pure functions of a result."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from dilkit.tools.bench.untyped_target import Result, Target, Values, measured

OURS, STORE_LOOP = "dilkit", "store loop"
CONTESTS = ("permutations", "ranks", "points", "sorts")
"""The lists of a result in which packages take part."""
PACKAGES = ("numpy-hilbert-curve", "hilbertcurve", "hilbertsfc")
NS = " ns/point"

Row = dict[str, Any]


def judge(result: Result) -> list[dict[str, Any]]:
    """All figures of `result`."""
    return [target.judge(result) for target in TARGETS]


def contests(result: Result) -> Iterator[tuple[str, Row]]:
    """The name and the row of every contest, in the order in which they are told."""
    for name in CONTESTS:
        for row in result[name]:
            yield title(name, row), row


def title(name: str, row: Row) -> str:
    """What a row is about."""
    if name == "permutations":
        return f"permutation, {size(row)}, {row['dtype']}"
    if name == "ranks":
        return f"rank, {size(row)}, int32"
    return f"{'sort' if name == 'sorts' else row['what']}, {row['ndim']}-D, {row['bits']} bits"


def size(row: Row) -> str:
    """The sides of a row's grid."""
    return " x ".join(map(str, row["shape"]))


def versus(row: Row, who: str, whom: str = OURS) -> float | None:
    """The time a point of `who` over that of `whom`; None where one of them was not timed.

    The median over the rounds of the contest: in a round both were disturbed alike.
    """
    if not measured(row, who, whom):
        return None
    theirs, ours = row["entries"][who], row["entries"][whom]
    rounds = zip(theirs["time"]["samples_s"], ours["time"]["samples_s"], strict=True)
    return float(statistics.median(a / b for a, b in rounds) * ours["points"] / theirs["points"])


def _ns(row: Row) -> float | None:
    return float(row["entries"][OURS]["ns_per_point"]) if measured(row, OURS) else None


def _permutation(grid: str, over: str | None = None) -> Callable[[Result], Values]:
    """Nanoseconds a point in int32; or the time in units of that of `over`."""

    def read(result: Result) -> Values:
        rows = [row for row in result["permutations"] if (row["grid"], row["dtype"]) == (grid, "int32")]
        found = {size(row): versus(row, OURS, over) if over else _ns(row) for row in rows}
        return {what: value for what, value in found.items() if value is not None}

    return read


def _points(what: str, ndim: int) -> Callable[[Result], Values]:
    def read(result: Result) -> Values:
        rows = [row for row in result["points"] if (row["what"], row["ndim"]) == (what, ndim)]
        found = {f"{row['bits']} bits": _ns(row) for row in rows}
        return {what: value for what, value in found.items() if value is not None}

    return read


def _warm(result: Result) -> Values:
    return {size(row): 1e6 * row["time"]["median_s"] for row in result["warm"]}


def _package(name: str) -> Callable[[Result], Values]:
    def read(result: Result) -> Values:
        found = {title: versus(row, name) for title, row in contests(result)}
        return {title: ratio for title, ratio in found.items() if ratio is not None}

    return read


def _absent(name: str, result: Result) -> str | None:
    return next((package["absent"] for package in result["packages"] if package["name"] == name), "not looked for")


def _near(rate: int) -> Callable[[Result], Values]:
    """Of the Hilbert curve, to the digits in which its limits are given."""

    def read(result: Result) -> Values:
        return {size(row): round(row["nearest_kept"]["hilbert"][str(rate)]["mean"], 2) for row in result["locality"]}

    return read


_HILBERT = (
    Target("2-D Hilbert, 1024 x 1024", 0.15, 0.08, _permutation("square"), NS),
    Target("2-D Hilbert, 4096 x 4096", 0.25, 0.15, _permutation("large"), NS),
    Target("the same, in units of a store loop into the same array", 2.0, 1.2, _permutation("large", STORE_LOOP)),
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
_FASTER = tuple(
    Target(f"time of {name} over dilkit's, the least of all rows", 1.0, None, _package(name), missing=partial(_absent, name))
    for name in PACKAGES
)
TARGETS = (*(replace(target, lower=True) for target in _HILBERT), *_FASTER)
