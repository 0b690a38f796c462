"""`dilkit bench --suite orders`: token orders on one thread. Everything is checked, then timed in turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

import numpy as np

from dilkit import order
from dilkit.orders.locality import locality_report
from dilkit.orders.points import instruction_set
from dilkit.orders.token_order import CURVES
from dilkit.plan import cache_clear
from dilkit.testing.memory import give_memory_back
from dilkit.threads import torch_threads
from dilkit.tools.bench.orders import checks, implementations, peers
from dilkit.tools.bench.orders.peers import Array
from dilkit.tools.bench.orders.record import Locality, Near, OrderCall, OrderCase, OrdersResult
from dilkit.tools.bench.orders.targets import TARGETS
from dilkit.tools.bench.suite import Step, Suite
from dilkit.tools.bench.target import Target
from dilkit.tools.measure.timing import time_interleaved

GRIDS = {"square": (1024, 1024), "large": (4096, 4096), "cube": (128, 128, 128), "frame": (1080, 1920), "video": (33, 45, 80)}
POINTS = {2: (1 << 20, (10, 16)), 3: (1 << 21, (7, 10))}
"""Random points: how many, and of how many bits, by the number of axes."""
SORTED = 1_000_000
NEAR = Locality(shape=(256, 256), segment_length=4096, dilation_rates=(4, 8, 16), nearest_kept={})
"""Where the distance to the nearest kept key is measured. It does not depend on the machine, and --quick leaves it alone."""


@dataclass(frozen=True)
class OrdersSuite(Suite[OrdersResult]):
    """--quick divides the sides of grids, and numbers of points by the square of that."""

    NAME = "orders"
    SUMMARY = "token orders against a store loop and packages that compute Hilbert curves, and what they keep near"
    RECORD = OrdersResult
    DIVISOR = 16

    repeats: int = 11
    budget: float = 0.25

    def steps(self) -> Iterator[Step]:
        for name, dtype in product(GRIDS, ("int32", "int64")):
            yield Step("permutations", f"permutation: {name}, {dtype}", partial(self.permutation, name, dtype))
        for name in ("square", "cube"):
            yield Step("ranks", f"rank: {name}", partial(self.rank, name))
        for ndim, (_, sizes) in POINTS.items():
            for bits, what in product(sizes, ("encode", "decode")):
                yield Step("points", f"{what}: {ndim}-D, {bits} bits", partial(self.points, what, ndim, bits))
        for ndim in POINTS:
            yield Step("sorts", f"sort: {ndim}-D", partial(self.sort, ndim))
        for what, measure in (("cold", self.cold), ("warm", self.warm)):
            yield from (Step(what, f"{what} order: {name}", partial(measure, name)) for name in GRIDS)
        yield Step("locality", "nearest kept keys", locality)

    @contextmanager
    def prepared(self) -> Iterator[dict[str, Any]]:
        with torch_threads(1):
            yield dict(packages=peers.describe(), isa=instruction_set())

    def targets(self) -> tuple[Target[OrdersResult], ...]:
        return TARGETS

    def wrong(self, result: OrdersResult) -> bool:
        """Whether something of dilkit's was wrong or failed; what a package does wrong is reported and not ranked."""
        packages = {package.name for package in result.packages}
        entries = [(name, entry) for case in result.cases for name, entry in case.entries.items()]
        ours = any(entry.verdict != "measured" for name, entry in entries if name not in packages)
        return ours or not all(found.passed for row in result.cold for found in row.check)

    def permutation(self, name: str, dtype: str) -> OrderCase:
        """The whole curve through a grid, into an array written to before."""
        shape = self._shape(name)
        return self._case(implementations.permutation(shape, dtype), prod(shape), grid=name, shape=shape, dtype=dtype)

    def rank(self, name: str) -> OrderCase:
        """The inverse, made directly and from the permutation."""
        shape = self._shape(name)
        return self._case(implementations.rank(shape), prod(shape), grid=name, shape=shape)

    def points(self, what: str, ndim: int, bits: int) -> OrderCase:
        """Codes of random points, or points of random codes."""
        count = self._count(POINTS[ndim][0])
        if what == "encode":
            entries = implementations.encode(_random(count, ndim, bits), bits)
        else:
            entries = implementations.decode(_random(count, 1, ndim * bits)[0], ndim, bits)
        return self._case(entries, count, what=what, ndim=ndim, bits=bits)

    def sort(self, ndim: int) -> OrderCase:
        """The order of random points."""
        bits, count = POINTS[ndim][1][-1], self._count(SORTED)
        return self._case(implementations.sort(_random(count, ndim, bits)), count, ndim=ndim, bits=bits)

    def cold(self, name: str) -> OrderCall:
        """`order(...)`, and with its ranks, with nothing cached and all memory fresh from the system."""
        shape = self._shape(name)
        perm, rank = order(shape).perm, order(shape).rank
        inverse = checks.same("rank[perm] is 0, 1, 2, ...", rank[perm], np.arange(len(perm)))
        calls = dict(permutation=lambda: order(shape), both=lambda: order(shape).rank)
        times = time_interleaved(calls, self.repeats, before=_forget)
        return OrderCall(grid=name, shape=shape, check=(*checks.visits(perm, shape), inverse), times=times)

    def warm(self, name: str) -> OrderCall:
        """`order(...)` when it is in the cache."""
        shape = self._shape(name)
        timed = time_interleaved({"": lambda: order(shape)}, self.repeats, min_time=self._min_time)
        return OrderCall(grid=name, shape=shape, time=timed[""])

    @property
    def _min_time(self) -> float:
        return 0.0 if self.quick else 0.02

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(max(2, side // self.DIVISOR) if self.quick else side for side in GRIDS[name])

    def _count(self, count: int) -> int:
        return count // self.DIVISOR**2 if self.quick else count

    def _case(self, found: implementations.Implementations, points: int, **fields: Any) -> OrderCase:
        entries = implementations.measured(found, points, self.repeats, self.budget, self._min_time)
        return OrderCase(points=points, entries=entries, **fields)


def _random(count: int, axes: int, bits: int) -> Array:
    return np.random.default_rng(0).integers(0, 1 << bits, (axes, count), np.uint16 if bits <= 16 else np.uint32)


def locality() -> Locality:
    """The mean distance to the nearest kept key, by curve and dilation rate."""
    near = {}
    for curve in CURVES:
        kept = locality_report(order(NEAR.shape, curve), NEAR.segment_length, NEAR.dilation_rates).kept
        near[curve] = {str(one.rate): Near(one.mean or 0.0, one.max or 0.0) for one in kept}
    return replace(NEAR, nearest_kept=near)


def _forget() -> None:
    cache_clear()
    give_memory_back()
