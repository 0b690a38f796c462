"""`dilkit bench --suite orders`: token orders on one thread, beside a store loop and hilbertsfc.

Where a row has `points`, its samples are seconds for a million points.
"""

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from typing import Any

import numpy as np

from dilkit import order
from dilkit.orders.locality import locality_report
from dilkit.orders.points import instruction_set
from dilkit.orders.token_order import CURVES
from dilkit.threads import torch_threads
from dilkit.tools.bench.suite import NO_OPTION, Suite, SuiteSizes, SuiteStep
from dilkit.tools.bench.target import Target, each
from dilkit.tools.bench.workloads import order_contenders as contenders
from dilkit.tools.bench.workloads.order_contenders import Array, Contender, Dilkit, HilbertSFC
from dilkit.tools.report.document import Axis
from dilkit.tools.report.points import sampled
from dilkit.tools.report.targets import number
from dilkit.tools.report.views import NAMES, SAMPLES, TIME, WHO, Column, PlotView, Report, ResultTable, fact
from dilkit.tools.results.rows import CaseRows, ResultRow

OURS, OTHER = Dilkit.name, HilbertSFC.name
COMPARED = ("permutation", "rank", "encode", "decode", "sort")
"""Tables of the cases in which hilbertsfc takes part; rank and sort are those of earlier versions."""
WARM = "warm"
GRIDS = {"square": (1024, 1024), "large": (4096, 4096), "cube": (128, 128, 128), "frame": (1080, 1920), "video": (33, 45, 80)}
POINTS = {2: (1 << 20, (10, 16)), 3: (1 << 21, (7, 10))}
RATES = (4, 8, 16)


@dataclass(frozen=True)
class OrdersSizes(SuiteSizes):
    """--quick divides the sides of `grids`, and numbers of points by the square of that.

    `points`: by the number of axes, how many and of how many bits. `near`, `near_segment`: grid and
    segment in which distances to the nearest kept key are measured, which do not depend on the machine.
    """

    divisor: int = 16
    grids: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: GRIDS)
    points: Mapping[int, tuple[int, tuple[int, ...]]] = field(default_factory=lambda: POINTS)
    near: tuple[int, int] = (256, 256)
    near_segment: int = 4096


def _over(case: CaseRows, who: str, base: str = OURS) -> float | None:
    """Median over the rounds of the time of `who` over that of `base`: in a round both were disturbed alike."""
    if not case.timed(who, base):
        return None
    return statistics.median(a / b for a, b in zip(case.rows[who].samples, case.rows[base].samples, strict=True))


def _speed(name: str, must: float, aim: float, table: str, **facts: Any) -> Target:
    read = each(table, lambda case: 1e3 * case.rows[OURS].median_s if case.timed(OURS) else None, "{size}", **facts)
    return Target(name, must, aim, read, " ns/point", lower=True)


def _nearest(every: int, must: float, aim: float) -> Target:
    """Mean distance along the Hilbert curve, to the digits in which its limits are given."""
    read = each("locality", lambda case: round(case.rows["hilbert"].values["mean"], 2), "{size}", every=every)
    return Target(f"nearest kept key, keeping every {every}th", must, aim, read, " cells", lower=True)


_STORES = each("permutation", lambda case: _over(case, OURS, contenders.STORE_LOOP), "{size}", grid="large", dtype="int32")
_WARM = each("order", lambda case: 1e6 * case.rows[WARM].median_s if case.timed(WARM) else None, "{size}")
TARGETS = (
    _speed("2-D Hilbert, 1024 x 1024", 0.15, 0.08, "permutation", grid="square", dtype="int32"),
    _speed("2-D Hilbert, 4096 x 4096", 0.25, 0.15, "permutation", grid="large", dtype="int32"),
    Target("the same, in units of a store loop into the same array", 2.0, 1.2, _STORES, lower=True),
    _speed("3-D Hilbert, 128 x 128 x 128", 0.2, 0.1, "permutation", grid="cube", dtype="int32"),
    _speed("generalised Hilbert, 1920 x 1080", 0.35, 0.2, "permutation", grid="frame", dtype="int32"),
    _speed("generalised Hilbert, 33 x 45 x 80", 1.0, 0.3, "permutation", grid="video", dtype="int32"),
    _speed("encode, random 2-D points", 1.5, 0.9, "encode", axes=2),
    _speed("decode, random 2-D points", 1.0, 0.6, "decode", axes=2),
    _speed("encode, random 3-D points", 3.0, 2.0, "encode", axes=3),
    _speed("decode, random 3-D points", 3.0, 2.0, "decode", axes=3),
    Target("a warm order(...), from the cache", 5.0, None, _WARM, " us", lower=True),
    *(_nearest(every, must, aim) for every, must, aim in ((4, 0.85, 0.84), (8, 1.10, 1.09), (16, 1.77, 1.76))),
    Target(
        f"time of {OTHER} over dilkit's, the least of all rows", 1.0, None, each(COMPARED, lambda case: _over(case, OTHER)),
        missing=lambda result: next((p["absent"] for p in result.facts["packages"] if p["name"] == OTHER), "not looked for"),
    ),
)  # fmt: skip


NS = Column("ns a point", lambda row, case: number(1e3 * row.median_s))
QUARTILES = Column("quartiles", lambda row, case: " - ".join(number(1e3 * quartile) for quartile in row.quartiles_s))
RATIO = Column("time / dilkit's", lambda row, case: "-" if (ratio := _over(case, row.who)) is None else number(ratio))
NS_AXES = NAMES, Axis("nanoseconds a point", "number")
KEPT = fact("every", "key kept", "every {}th"), WHO, fact("mean", template="{:.3f}"), fact("max", "largest", "{:.3g}")
REPORT = Report(
    place="{device_name}, one thread, encode and decode with {isa}",
    packages="Python {python}, numpy {numpy}",
    tables=(
        ResultTable("All times", COMPARED, (fact("what"), WHO, NS, QUARTILES, SAMPLES, fact("points", template="{:,}"), RATIO)),
        ResultTable("Calls of order, from the cache", "order", (fact("size", "grid"), TIME), who=(WARM,)),
        ResultTable("Distance to the nearest kept key", "locality", KEPT, timed=False),
    ),
    plots=(
        PlotView(
            "Time a point of a permutation, with 95% intervals",
            "permutation",
            "{size}, {dtype}",
            lambda row, case: sampled([1e3 * sample for sample in row.samples]) if row.samples else None,
            NS_AXES,
            who=(OURS, contenders.STORE_LOOP),
        ),
    ),
    sentences={
        "2-D Hilbert, 1024 x 1024": "the Hilbert order of 1024 x 1024 tokens takes {}",
        "generalised Hilbert, 33 x 45 x 80": "that of 33 x 45 x 80 {}",
        "a warm order(...), from the cache": "one that is in the cache {}",
        "time of hilbertsfc over dilkit's, the least of all rows": "hilbertsfc, the fastest other package, at least {} as long",
    },
    notes=lambda result: [", ".join(f"{one['name']} {one['version'] or one['absent']}" for one in result.facts["packages"])],
    method="Medians of all samples on one thread, all contenders of a row in turns; a sample is as many calls as last 20 ms, a "
    "ratio the median of those within a round. dilkit's results go into arrays that were written to before; the store loop is "
    "out[i] = i into the array of dilkit's permutation. hilbertsfc is compiled before; its permutation is the faster of decode "
    "and NumPy, and of its kernel in a numba loop. On grids that are no cubes of a power of two earlier versions sorted codes, "
    "which makes a curve with jumps. Before it is timed, each must visit a small grid by steps of one cell, and its result must "
    "visit each cell once, or give the inputs back. Distances to the nearest kept key are means over 256 x 256 cells in segments "
    "of 4,096.",
)


@dataclass(frozen=True)
class OrdersSuite(Suite):
    """Orders of grids, codes of points, and distances; hilbertsfc is measured where it is installed."""

    NAME = "orders"
    SUMMARY = "token orders against a store loop and hilbertsfc, and what they keep near"
    TARGETS = TARGETS
    PEERS = (OTHER,)

    repeats: int = 11
    sizes: OrdersSizes = field(default_factory=OrdersSizes, metadata=NO_OPTION)
    other: HilbertSFC = field(default_factory=HilbertSFC, metadata=NO_OPTION)

    def steps(self) -> Iterator[SuiteStep]:
        for name in self.sizes.grids:
            yield SuiteStep("permutation", f"permutation: {name}, int32", partial(self.permutation, name))
        for ndim, (_, sizes) in self.sizes.points.items():
            for bits, what in product(sizes, ("encode", "decode")):
                yield SuiteStep(what, f"{what}: {ndim}-D, {bits} bits", partial(self.points, what, ndim, bits))
        for name in self.sizes.grids:
            yield SuiteStep("order", f"{WARM} order: {name}", partial(self.order, name))
        yield SuiteStep("locality", "nearest kept keys", self.locality)

    @contextmanager
    def prepared(self) -> Iterator[dict[str, Any]]:
        version = self.other.version()
        absent = None if version else "not installed: Python 3.12 or newer, and pip install dilkit[peers]"
        with torch_threads(1):
            yield dict(packages=[dict(name=OTHER, version=version, absent=absent)], isa=instruction_set())

    def permutation(self, name: str) -> list[ResultRow]:
        """Time the whole curve through a grid, written into an existing array."""
        shape, case = self._grid(name)
        case |= dict(what=f"permutation, {case['size']}, int32", dtype="int32")
        return self._compared("permutation", case, prod(shape), contenders.permutation(shape, self._present))

    def points(self, what: str, ndim: int, bits: int) -> list[ResultRow]:
        count = self.sizes.points[ndim][0] // self.divisor**2
        if what == "decode":
            compared = contenders.decode(_random(count, 1, ndim * bits)[0], ndim, bits, self._present)
        else:
            compared = contenders.encode(_random(count, ndim, bits), bits, self._present)
        case = dict(what=f"{what}, {ndim}-D, {bits} bits", size=f"{bits} bits", axes=ndim)
        return self._compared(what, case, count, compared)

    def order(self, name: str) -> list[ResultRow]:
        shape, case = self._grid(name)
        perm, rank = order(shape).perm, order(shape).rank
        findings = contenders.visits(perm, shape) | contenders.same("rank[perm[i]] is i", rank[perm], np.arange(len(perm)))
        warm = Contender(lambda: partial(order, shape), lambda result: findings)
        return self._compared("order", case, 0, {WARM: warm})

    def locality(self) -> list[ResultRow]:
        rows, shape, segment = [], self.sizes.near, self.sizes.near_segment
        for curve in CURVES:
            for near in locality_report(order(shape, curve), segment, RATES).kept:
                case = dict(size=_size(shape), segment_length=segment, every=near.rate)
                rows.append(
                    ResultRow(table="locality", case=case, who=curve, values=dict(mean=near.mean or 0.0, max=near.max or 0.0))
                )
        return rows

    @property
    def _present(self) -> list[HilbertSFC]:
        return [self.other] if self.other.version() else []

    def _grid(self, name: str) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Return the shape of a grid, and the facts of a case that name it: its sides in words and its name."""
        shape = tuple(max(2, side // self.divisor) for side in self.sizes.grids[name])
        return shape, dict(size=_size(shape), grid=name)

    def _compared(self, table: str, case: dict[str, Any], points: int, compared: contenders.Contenders) -> list[ResultRow]:
        min_time = 0.0 if self.quick else 0.02
        return contenders.compare(table, case, points, compared, repeats=self.repeats, min_time=min_time)


def _random(count: int, axes: int, bits: int) -> Array:
    return np.random.default_rng(0).integers(0, 1 << bits, (axes, count), np.uint16 if bits <= 16 else np.uint32)


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
