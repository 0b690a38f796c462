"""`dilkit bench --suite orders`: token orders on one thread. Everything is checked, then timed in turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

import numpy as np

from dilkit import order
from dilkit.op.free_memory import give_memory_back
from dilkit.orders.locality import locality_report
from dilkit.orders.points import instruction_set
from dilkit.orders.token_order import CURVES
from dilkit.plan import cache_clear
from dilkit.threads import torch_threads
from dilkit.tools.bench.orders import checks, implementations, targets
from dilkit.tools.bench.orders.cases import OrdersSizes
from dilkit.tools.bench.orders.peers import PEERS, Array, Peer, describe
from dilkit.tools.bench.orders.record import Locality, Near, OrderCall, OrderCase, OrdersResult
from dilkit.tools.bench.suite import NO_OPTION, Step, Suite
from dilkit.tools.measure.timing import time_interleaved


@dataclass(frozen=True)
class OrdersSuite(Suite[OrdersResult]):
    """--quick divides the sides of grids, and numbers of points by the square of that. `packages`: measured where they are
    installed."""

    NAME = "orders"
    SUMMARY = "token orders against a store loop and packages that compute Hilbert curves, and what they keep near"
    RECORD = OrdersResult
    TARGETS = targets.TARGETS

    repeats: int = 11
    budget: float = 0.25
    sizes: OrdersSizes = field(default_factory=OrdersSizes, metadata=NO_OPTION)
    packages: tuple[Peer, ...] = field(default=PEERS, metadata=NO_OPTION)

    def steps(self) -> Iterator[Step]:
        for name, dtype in product(self.sizes.grids, ("int32", "int64")):
            yield Step("permutations", f"permutation: {name}, {dtype}", partial(self.permutation, name, dtype))
        for name in ("square", "cube"):
            yield Step("ranks", f"rank: {name}", partial(self.rank, name))
        for ndim, (_, sizes) in self.sizes.points.items():
            for bits, what in product(sizes, ("encode", "decode")):
                yield Step("points", f"{what}: {ndim}-D, {bits} bits", partial(self.points, what, ndim, bits))
        for ndim in self.sizes.points:
            yield Step("sorts", f"sort: {ndim}-D", partial(self.sort, ndim))
        for what, measure in (("cold", self.cold), ("warm", self.warm)):
            yield from (Step(what, f"{what} order: {name}", partial(measure, name)) for name in self.sizes.grids)
        yield Step("locality", "nearest kept keys", partial(locality, self.sizes.near))

    @contextmanager
    def prepared(self) -> Iterator[dict[str, Any]]:
        with torch_threads(1):
            yield dict(packages=describe(self.packages), isa=instruction_set())

    def wrong(self, result: OrdersResult) -> bool:
        """Whether something of dilkit's was wrong or failed; what a package does wrong is reported and not ranked."""
        packages = {package.name for package in result.packages}
        entries = [(name, entry) for case in result.cases for name, entry in case.entries.items()]
        ours = any(entry.verdict != "measured" for name, entry in entries if name not in packages)
        return ours or not all(found.passed for row in result.cold for found in row.check)

    def permutation(self, name: str, dtype: str) -> OrderCase:
        """The whole curve through a grid, into an array written to before."""
        shape = self._shape(name)
        return self._case(
            implementations.permutation(shape, dtype, self._present), prod(shape), grid=name, shape=shape, dtype=dtype
        )

    def rank(self, name: str) -> OrderCase:
        """The inverse, made directly and from the permutation."""
        shape = self._shape(name)
        return self._case(implementations.rank(shape, self._present), prod(shape), grid=name, shape=shape)

    def points(self, what: str, ndim: int, bits: int) -> OrderCase:
        """Codes of random points, or points of random codes."""
        count = self._count(self.sizes.points[ndim][0])
        if what == "encode":
            entries = implementations.encode(_random(count, ndim, bits), bits, self._present)
        else:
            entries = implementations.decode(_random(count, 1, ndim * bits)[0], ndim, bits, self._present)
        return self._case(entries, count, what=what, ndim=ndim, bits=bits)

    def sort(self, ndim: int) -> OrderCase:
        """The order of random points."""
        bits, count = self.sizes.points[ndim][1][-1], self._count(self.sizes.sorted)
        return self._case(implementations.sort(_random(count, ndim, bits), self._present), count, ndim=ndim, bits=bits)

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
    def _present(self) -> list[Peer]:
        return [package for package in self.packages if package.absent() is None]

    @property
    def _min_time(self) -> float:
        return 0.0 if self.quick else 0.02

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(max(2, side // self.divisor) for side in self.sizes.grids[name])

    def _count(self, count: int) -> int:
        return count // self.divisor**2

    def _case(self, found: implementations.Implementations, points: int, **fields: Any) -> OrderCase:
        entries = implementations.measured(found, points, self.repeats, self.budget, self._min_time)
        return OrderCase(points=points, entries=entries, **fields)


def _random(count: int, axes: int, bits: int) -> Array:
    return np.random.default_rng(0).integers(0, 1 << bits, (axes, count), np.uint16 if bits <= 16 else np.uint32)


def locality(at: Locality) -> Locality:
    """The mean distance to the nearest kept key, by curve and dilation rate."""
    near = {}
    for curve in CURVES:
        kept = locality_report(order(at.shape, curve), at.segment_length, at.dilation_rates).kept
        near[curve] = {str(one.rate): Near(one.mean or 0.0, one.max or 0.0) for one in kept}
    return replace(at, nearest_kept=near)


def _forget() -> None:
    cache_clear()
    give_memory_back()
