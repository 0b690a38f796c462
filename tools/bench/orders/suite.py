"""`dilkit bench --suite orders`: what token orders are measured by, on one thread. Everything is checked, then timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import Any

import numpy as np

from dilkit.tools.bench.orders import cases as order_rows
from dilkit.tools.bench.orders import checks as order_checks
from dilkit.tools.bench.orders import engine as order_engine
from dilkit.tools.bench.orders import peers as order_peers
from dilkit.tools.bench.orders import targets as suite_orders_targets
from dilkit.tools.bench.orders.contest import Contest
from dilkit.tools.bench.orders.peers import Array
from dilkit.tools.measure import memory
from dilkit.tools.measure import timing as measure
from dilkit.tools.measure.overhead import one_thread
from dilkit.tools.report.kinds import suite_orders_report
from dilkit.tools.results.decode import encode

SUMMARY = "token orders against a store loop and packages that compute Hilbert curves, and what they keep near"
KIND = "suite-orders"
DEVICE = "cpu"
REPORT, judge = suite_orders_report, suite_orders_targets.judge
QUICK = 16
"""By what --quick divides the sides of grids, and numbers of points by its square."""
LISTS = ("permutations", "ranks", "points", "sorts", "cold", "warm", "locality")
"""The lists of a result."""
CONTESTS = LISTS[:4]
"""Those in which packages take part."""
GRIDS = {"square": (1024, 1024), "large": (4096, 4096), "cube": (128, 128, 128), "frame": (1080, 1920), "video": (33, 45, 80)}
POINTS = {2: (1 << 20, (10, 16)), 3: (1 << 21, (7, 10))}
"""Random points: how many, and of how many bits, by the number of axes."""
SORTED = 1_000_000
NEAR: dict[str, Any] = dict(shape=(256, 256), segment_length=4096, dilation_rates=(4, 8, 16))
"""Where the distance to the nearest kept key is measured. It does not depend on the machine, and --quick leaves it alone."""

Row = dict[str, Any]
Step = tuple[str, str, Callable[[], Row]]


@dataclass(frozen=True)
class Suite:
    """The steps of a run. `repeats`: samples; `budget`: seconds of one call, beyond which a package is given fewer points."""

    quick: bool = False
    repeats: int = 11
    budget: float = 0.25

    def steps(self) -> Iterator[Step]:
        """(the list of the result that it goes to, what is going on, the measurement)."""
        for name, dtype in product(GRIDS, ("int32", "int64")):
            yield "permutations", f"permutation: {name}, {dtype}", partial(self.permutation, name, dtype)
        for name in ("square", "cube"):
            yield "ranks", f"rank: {name}", partial(self.rank, name)
        for ndim, (_, sizes) in POINTS.items():
            for bits, what in product(sizes, (self.encode, self.decode)):
                yield "points", f"{what.__name__}: {ndim}-D, {bits} bits", partial(what, ndim, bits)
        for ndim in POINTS:
            yield "sorts", f"sort: {ndim}-D", partial(self.sort, ndim)
        for what, name in product((self.cold, self.warm), GRIDS):
            yield what.__name__, f"{what.__name__} order: {name}", partial(what, name)
        yield "locality", "nearest kept keys", self.locality

    def permutation(self, name: str, dtype: str) -> Row:
        """The whole curve through a grid, into an array written to before."""
        shape = self._shape(name)
        return self._run(order_rows.permutation(shape, dtype), prod(shape), grid=name, shape=list(shape), dtype=dtype)

    def rank(self, name: str) -> Row:
        """The inverse, made directly and from the permutation."""
        shape = self._shape(name)
        return self._run(order_rows.rank(shape), prod(shape), grid=name, shape=list(shape))

    def encode(self, ndim: int, bits: int) -> Row:
        """Codes of random points."""
        coords = self._random(POINTS[ndim][0], ndim, bits)
        return self._run(order_rows.encode(coords, bits), len(coords), what="encode", ndim=ndim, bits=bits)

    def decode(self, ndim: int, bits: int) -> Row:
        """Points of random codes."""
        codes = self._random(POINTS[ndim][0], 1, ndim * bits)[:, 0]
        return self._run(order_rows.decode(codes, ndim, bits), len(codes), what="decode", ndim=ndim, bits=bits)

    def sort(self, ndim: int) -> Row:
        """The order of random points."""
        bits = POINTS[ndim][1][-1]
        coords = self._random(SORTED, ndim, bits)
        return self._run(order_rows.sort(coords, bits), len(coords), ndim=ndim, bits=bits)

    def cold(self, name: str) -> Row:
        """`order(...)`, and with its ranks, with nothing cached and all memory fresh from the system."""
        shape = self._shape(name)
        perm, rank = _order(shape).perm, _order(shape).rank
        check = order_checks.walk(perm, shape) + order_checks.same("rank[perm] is 0, 1, 2, ...", rank[perm], np.arange(len(perm)))
        calls = dict(permutation=partial(_order, shape), both=lambda: _order(shape).rank)
        timed = measure.time_interleaved(calls, self.repeats, before=_forget)
        return dict(grid=name, shape=list(shape), check=check, times={what: encode(samples) for what, samples in timed.items()})

    def warm(self, name: str) -> Row:
        """`order(...)` when it is in the cache."""
        shape = self._shape(name)
        timed = measure.time_interleaved({"": partial(_order, shape)}, self.repeats, min_time=self._min_time)[""]
        return dict(grid=name, shape=list(shape), time=encode(timed))

    def locality(self) -> Row:
        """The mean distance to the nearest kept key, by curve and dilation rate."""
        from dilkit.orders.locality import locality_report
        from dilkit.orders.token_order import CURVES, order

        shape, length, rates = NEAR.values()
        kept = {curve: locality_report(order(shape, curve), length, rates).kept for curve in CURVES}
        near = {curve: {str(one.rate): dict(mean=one.mean, max=one.max) for one in found} for curve, found in kept.items()}
        return dict(shape=list(shape), segment_length=length, dilation_rates=list(rates), nearest_kept=near)

    @property
    def _min_time(self) -> float:
        return 0.0 if self.quick else 0.02

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(max(2, side // QUICK) if self.quick else side for side in GRIDS[name])

    def _random(self, count: int, axes: int, bits: int) -> Array:
        count = count // QUICK**2 if self.quick else count
        return np.random.default_rng(0).integers(0, 1 << bits, (count, axes), np.uint16 if bits <= 16 else np.uint32)

    def _run(self, candidates: order_rows.Candidates, points: int, **told: Any) -> Row:
        contest = Contest(self.repeats, self.budget, self._min_time)
        return told | dict(points=points, entries=contest.run(candidates, points))


def _order(shape: tuple[int, ...]) -> Any:
    from dilkit import order

    return order(shape)


def _forget() -> None:
    from dilkit.plan import cache_clear

    cache_clear()
    memory.give_memory_back()


@contextmanager
def prepared() -> Iterator[dict[str, Any]]:
    """Within the block the suite can run; facts for its result."""
    with one_thread():
        yield dict(packages=order_peers.describe(), isa=order_engine.instruction_set())


def wrong(result: dict[str, Any]) -> bool:
    """Whether something of dilkit's was wrong or failed; what a package does wrong is told and not ranked."""
    entries = [(who, entry) for name in CONTESTS for row in result[name] for who, entry in row["entries"].items()]
    ours = any(entry["verdict"] != "measured" for who, entry in entries if who not in {p["name"] for p in result["packages"]})
    return ours or not all(found["passed"] for row in result["cold"] for found in row["check"])
