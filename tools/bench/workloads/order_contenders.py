"""Contenders of the suite of token orders, case by case: dilkit's engines, and other packages that compute Hilbert curves.

A package computes codes and coordinates on a cube whose sides are a power of two. Missing functions are put together here in the
fastest way found. Inputs and buffers are made before a call.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dilkit.orders import points
from dilkit.orders.compiled import _curves, _generalised_hilbert
from dilkit.orders.curves import is_power_of_two_cube
from dilkit.tools.console.text import error_line
from dilkit.tools.measure.timing import Call, time_interleaved
from dilkit.tools.results.rows import Row

Array = NDArray[Any]
STORE_LOOP = "store loop"
TRIAL = 2048
"""Points of the calls that decide how many a package gets."""
STRETCH = 256
"""Cells that are visited in the middle of a larger curve."""
SMALL_BITS = {2: 4, 3: 3}
"""Bits of the grid that is visited as a whole, by its number of axes: 16 and 8 cells a side."""
Findings = dict[str, bool]
"""Statements about a result, and whether each is true."""


class Contender(NamedTuple):
    """An implementation of a case: `make(count)` is its call for so many points, `check(count, result)` checks the result."""

    make: Callable[[int], Call]
    check: Callable[[int, Any], Findings]


Contenders = dict[str, Contender]


def compare(table: str, case: dict[str, Any], most: int, contenders: Contenders, budget: float, **timing: Any) -> list[Row]:
    """Check all contenders, and time those that are right in turns: seconds a call or, with points, for a million of them.

    `most`: points of all but packages, which get as many as `budget` seconds allow. `timing`: as of `time_interleaved`.
    """
    rows, calls, packages = dict[str, Row](), dict[str, Call](), [package.name for package in PACKAGES]
    for who, (make, check) in contenders.items():
        try:
            few = count = min(TRIAL, most) if who in packages else most
            if few < most:
                count = min(most, max(few, int(budget * few / seconds_of(make(few)))))
            call = make(count)
            findings = check(count, call())
        except Exception as error:
            rows[who] = Row(table=table, case=case, who=who, verdict="failed", reasons=(error_line(error),))
            continue
        wrong = tuple(f"not so: {what}" for what, passed in findings.items() if not passed)
        values = dict(checked=list(findings)) | (dict(points=count) if most else {})
        rows[who] = Row(table=table, case=case, who=who, verdict="wrong" if wrong else "measured", reasons=wrong, values=values)
        calls |= {} if wrong else {who: call}
    for who, samples in time_interleaved(calls, **timing).items():
        scaled = tuple(1e6 / rows[who].values.get("points", 1e6) * sample for sample in samples.samples_s)
        rows[who] = replace(rows[who], samples=scaled, calls=samples.calls_per_sample)
    return [*rows.values()]


def permutation(shape: tuple[int, ...], dtype: str, packages: Sequence[HilbertCurve]) -> Contenders:
    """The whole curve through a grid, beside a store loop into the same array."""
    out, ndim, bits = np.zeros(prod(shape), dtype), len(shape), (max(shape) - 1).bit_length()
    if is_power_of_two_cube(shape):
        make = lambda one, count: one.permutation(ndim, bits, out[:count])  # noqa: E731
        contenders = _contenders([Dilkit(), *packages], ndim, bits, make, lambda one, count, cells: visits(cells, shape))
    else:  # packages have codes on cubes of a power of two alone: sorted codes are a curve with jumps
        call = filling(out, _generalised_hilbert.generalised_hilbert, shape, 1)
        cells = np.stack(np.unravel_index(np.arange(len(out)), shape))
        contenders = {Dilkit.name: Contender(lambda count: call, lambda count, cells: visits(cells, shape))}
        contenders |= _sorters(cells, bits, packages)
    loop = filling(out, _curves.row_major)
    stores = Contender(lambda count: loop, lambda count, indices: same("out[i] is i", indices, np.arange(count)))
    return contenders | {STORE_LOOP: stores}


def rank(shape: Sequence[int], packages: Sequence[HilbertCurve]) -> Contenders:
    """The position on the curve of each cell of a cube, the cells in row-major order; and the inverse of the permutation."""
    ndim, bits, count = len(shape), (shape[0] - 1).bit_length(), prod(shape)
    perm = Dilkit().permutation(ndim, bits, np.zeros(count, np.int32))()
    invert = filling(np.zeros_like(perm), lambda out: _curves.invert(perm, out))
    cells = np.stack(np.unravel_index(np.arange(count), tuple(shape)))
    make = lambda one, count: one.ranks(ndim, bits, count)  # noqa: E731
    ranks = _contenders([Dilkit(), *packages], ndim, bits, make, partial(_come_back, cells, bits))
    inverse = Contender(lambda count: invert, lambda count, rank: same("rank[perm[i]] is i", rank[perm], np.arange(count)))
    return ranks | {f"{Dilkit.name}, inverted": inverse}


def encode(axes: Array, bits: int, packages: Sequence[HilbertCurve]) -> Contenders:
    """Codes of points."""
    make = lambda one, count: one.encoder(axes[:, :count], bits)  # noqa: E731
    return _contenders([Dilkit(), Interleaved(), *packages], len(axes), bits, make, partial(_come_back, axes, bits))


def decode(codes: Array, ndim: int, bits: int, packages: Sequence[HilbertCurve]) -> Contenders:
    """Points of codes."""

    def check(one: HilbertCurve, count: int, cells: Any) -> Findings:
        return same("encode gives the codes back", one.encoder(np.stack(axes_of(cells)), bits)(), codes[:count])

    make = lambda one, count: one.decoder(codes[:count], ndim, bits)  # noqa: E731
    return _contenders([Dilkit(), Interleaved(), *packages], ndim, bits, make, check)


def sort(axes: Array, packages: Sequence[HilbertCurve]) -> Contenders:
    """The order of points along the curve; beside it, NumPy's stable sort of dilkit's codes."""
    axes = axes - axes.min(1, keepdims=True)  # sort_points does so too
    bits = max(1, int(axes.max()).bit_length())
    sorters = _sorters(axes, bits, [Dilkit(), *packages])
    by_numpy = Contender(lambda count: HilbertCurve.sorter(Dilkit(), axes[:, :count], bits), sorters[Dilkit.name].check)
    return sorters | {"np.argsort": by_numpy}


def _sorters(axes: Array, bits: int, curves: Sequence[HilbertCurve]) -> Contenders:
    def check(one: HilbertCurve, count: int, permutation: Any) -> Findings:
        return sorts(permutation, np.asarray(one.encoder(axes[:, :count], bits)()))

    return _contenders(curves, len(axes), bits, lambda one, count: one.sorter(axes[:, :count], bits), check)


def _come_back(axes: Array, bits: int, one: HilbertCurve, count: int, codes: Any) -> Findings:
    """Check that the points of their codes are the points again."""
    cells = axes_of(one.decoder(np.asarray(codes), len(axes), bits)())
    return same("decode gives the points back", np.stack(cells), axes[:, :count])


def _contenders(
    curves: Sequence[HilbertCurve],
    ndim: int,
    bits: int,
    make: Callable[[HilbertCurve, int], Call],
    check: Callable[[HilbertCurve, int, Any], Findings],
) -> Contenders:
    """Contenders by name; of each it is checked first that its codes are positions on a curve.

    A small grid is visited as a whole, and a stretch in the middle of the curve of `bits`.
    """

    def checked(one: HilbertCurve, count: int, result: Any) -> Findings:
        small = SMALL_BITS[ndim]
        codes = np.arange(1 << ndim * small)
        cells = axes_of(one.decoder(codes, ndim, small)())
        visited = visits(row_major(cells, small, np.zeros(len(codes), np.int32)), (1 << small,) * ndim)
        middle, half = 1 << ndim * bits - 1, min(STRETCH, 1 << ndim * bits) // 2
        stretch = np.stack(axes_of(one.decoder(np.arange(middle - half, middle + half), ndim, bits)()))
        steps = np.abs(np.diff(stretch.astype(np.int64), axis=1)).sum(0)
        return (
            visited
            | {f"cells in the middle of the curve of {bits} bits are a step of one cell apart": bool((steps == 1).all())}
            | same("their codes are 0, 1, 2, ...", one.encoder(np.stack(cells), small)(), codes)
            | check(one, count, result)
        )

    return {one.name: Contender(partial(make, one), partial(checked, one)) for one in curves}


def visits(indices: Array, shape: Sequence[int]) -> Findings:
    """Check that row-major `indices` are distinct cells of the grid, all of them if there are as many, by steps of one cell.

    A curve may have to jump where a side is odd: then the number of jumps is only reported.
    """
    cells, axes = prod(shape), np.unravel_index(indices, tuple(shape))
    jumps = int(np.count_nonzero(sum(np.abs(np.diff(axis)) for axis in axes) != 1))
    return {
        f"{len(indices):,} of {cells:,} cells are visited, each once": len(np.unique(indices)) == len(indices),
        f"steps that are not of one cell: {jumps}": jumps == 0 or any(side % 2 for side in shape),
    }


def sorts(permutation: Array, codes: Array) -> Findings:
    """Check that `permutation` puts `codes` into ascending order."""
    once = np.array_equal(np.sort(permutation), np.arange(len(codes)))
    return {
        "each point occurs once, by ascending codes": once and bool((np.diff(codes[permutation].astype(np.int64)) >= 0).all())
    }


def same(what: str, left: Any, right: Array) -> Findings:
    """Check that two results are the same."""
    return {what: np.array_equal(np.asarray(left), right)}


class HilbertCurve(ABC):
    """An implementation of the Hilbert curve. `needs`: command that installs it."""

    name: str
    module: str
    summary: str
    needs: str = "pip install dilkit[peers]"

    def version(self) -> str | None:
        """Return the installed version, None where it is not installed."""
        try:
            return metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return None

    def function(self, name: str) -> Any:
        """Return a function or class of the package."""
        return getattr(importlib.import_module(self.module), name)

    @abstractmethod
    def encoder(self, axes: Array, bits: int) -> Call:
        """Compute the codes of points, all coordinates below `2**bits`."""

    @abstractmethod
    def decoder(self, codes: Array, ndim: int, bits: int) -> Call:
        """Compute the coordinates of the points with these codes."""

    def permutation(self, ndim: int, bits: int, out: Array) -> Call:
        """Compute the row-major indices of the first `len(out)` cells of the curve through a grid of `2**bits` a side."""
        decode = self.decoder(np.arange(len(out), dtype=np.uint32), ndim, bits)
        return lambda: row_major(axes_of(decode()), bits, out)

    def ranks(self, ndim: int, bits: int, count: int) -> Call:
        """Compute the codes of the first `count` cells of that grid, in row-major order."""
        return self.encoder(np.stack(np.unravel_index(np.arange(count), (1 << bits,) * ndim)), bits)

    def sorter(self, axes: Array, bits: int) -> Call:
        """Compute the permutation that puts points into the order of their codes."""
        encode = self.encoder(axes, bits)
        return lambda: np.argsort(encode(), kind="stable")


class Dilkit(HilbertCurve):
    """The engines on one thread. Results go into arrays that were written to before; coordinates are an array an axis."""

    name = "dilkit"

    def encoder(self, axes: Array, bits: int) -> Call:
        out = np.zeros(len(axes[0]), np.uint32)
        return partial(points.encode, tuple(axes.astype(_narrow(bits))), bits, out=out)

    def decoder(self, codes: Array, ndim: int, bits: int) -> Call:
        out = tuple(np.zeros((ndim, len(codes)), _narrow(bits)))
        return partial(points.decode, codes.astype(np.uint32), ndim, bits, out=out)

    def permutation(self, ndim: int, bits: int, out: Array) -> Call:
        return filling(out, _curves.hilbert, ndim, bits, 1)

    def ranks(self, ndim: int, bits: int, count: int) -> Call:
        return filling(np.zeros(count, np.int32), _curves.hilbert_rank, ndim, bits, 1)

    def sorter(self, axes: Array, bits: int) -> Call:
        sort = partial(points.sort_points, np.ascontiguousarray(axes.T))
        return lambda: sort().perm


class Interleaved(Dilkit):
    """The engines with coordinates `(n, ndim)`, point by point."""

    name = "dilkit, (n, ndim)"

    def encoder(self, axes: Array, bits: int) -> Call:
        coords = np.ascontiguousarray(axes.T.astype(_narrow(bits)))
        return partial(points.encode, coords, bits, out=np.zeros(len(coords), np.uint32))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Call:
        out = np.zeros((len(codes), ndim), _narrow(bits))
        return partial(points.decode, codes.astype(np.uint32), ndim, bits, out=out)


class NumpyHilbertCurve(HilbertCurve):
    """Skilling's transform on arrays of bits."""

    name, module = "numpy-hilbert-curve", "hilbert"
    summary = "Skilling's transform, vectorised in NumPy over arrays of single bits"

    def encoder(self, axes: Array, bits: int) -> Call:
        return partial(self.function("encode"), np.ascontiguousarray(axes.T, np.int64), len(axes), bits)

    def decoder(self, codes: Array, ndim: int, bits: int) -> Call:
        return partial(self.function("decode"), codes.astype(np.int64), ndim, bits)


class HilbertCurvePackage(HilbertCurve):
    """Skilling's transform on Python integers: it is fastest with lists."""

    name, module = "hilbertcurve", "hilbertcurve.hilbertcurve"
    summary = "Skilling's transform, point by point in Python; lists in, lists out"

    def encoder(self, axes: Array, bits: int) -> Call:
        return partial(self.function("HilbertCurve")(bits, len(axes)).distances_from_points, axes.T.tolist())

    def decoder(self, codes: Array, ndim: int, bits: int) -> Call:
        return partial(self.function("HilbertCurve")(bits, ndim).points_from_distances, codes.tolist())


class HilbertSFC(HilbertCurve):
    """Tables and SIMD, compiled by numba when first called."""

    name, module = "hilbertsfc", "hilbertsfc"
    summary = (
        "tables and SIMD compiled by numba; an array an axis, results into given buffers, already compiled; permutations by "
        "decode and NumPy or by its kernel in a numba loop, whichever is faster"
    )
    needs = "Python 3.12 or newer, and pip install dilkit[peers]"

    def encoder(self, axes: Array, bits: int) -> Call:
        out = np.zeros(len(axes[0]), np.uint32)
        return partial(self.function(f"hilbert_encode_{len(axes)}d"), *axes.astype(_narrow(bits)), nbits=bits, out=out)

    def decoder(self, codes: Array, ndim: int, bits: int) -> Call:
        outs = {f"out_{axis}": np.zeros(len(codes), _narrow(bits)) for axis in "xyz"[:ndim]}
        return partial(self.function(f"hilbert_decode_{ndim}d"), codes.astype(np.uint32), nbits=bits, **outs)

    def permutation(self, ndim: int, bits: int, out: Array) -> Call:
        """Use its kernel for one point, compiled into a loop over all, where that is faster."""
        kernel = self.function(f"get_hilbert_decode_{ndim}d_kernel")(bits)

        def fill(out: Array) -> None:
            for d in range(out.shape[0]):
                index = 0
                for axis in kernel(d):
                    index = (index << bits) | axis
                out[d] = index

        loop = filling(out, importlib.import_module("numba").njit(fill))
        return min(super().permutation(ndim, bits, out), loop, key=seconds_of)


PACKAGES: tuple[HilbertCurve, ...] = (NumpyHilbertCurve(), HilbertCurvePackage(), HilbertSFC())


def axes_of(decoded: Any) -> Any:
    """Return decoded coordinates as an array an axis; they are that, or point by point."""
    return decoded if isinstance(decoded, tuple) else np.asarray(decoded).astype(np.int64, copy=False).T


def filling(out: Array, engine: Any, *arguments: Any) -> Call:
    """Make the call of an engine that writes to `out`."""

    def fill() -> Array:
        engine(out, *arguments)
        return out

    return fill


def row_major(axes: Any, bits: int, out: Array) -> Array:
    """Write the row-major indices of cells in a grid of `2**bits` a side to `out`."""
    out[:] = axes[0]
    for axis in axes[1:]:
        np.left_shift(out, bits, out=out)
        np.bitwise_or(out, axis, out=out)
    return out


def seconds_of(call: Call) -> float:
    """Return the fastest of three calls after a first one, in which a package may still compile."""
    return min(time_interleaved({"": call}, repeats=3)[""].samples_s)


def _narrow(bits: int) -> type[np.unsignedinteger[Any]]:
    return np.uint8 if bits <= 8 else np.uint16
