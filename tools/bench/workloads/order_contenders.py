"""Contenders of the suite of token orders: the cases with the checks of their results, then dilkit's engines and other packages.

A package computes codes and coordinates on a cube whose sides are a power of two. Missing functions are put together here in the
fastest way found: a permutation from decoded coordinates, the order of points from sorted codes. Inputs and buffers are made
before a call; `axes_of` and `permutation_of` bring results into one form.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from dilkit.tools.results.record import Samples
from dilkit.tools.results.rows import Row

Array = NDArray[Any]
STORE_LOOP = "store loop"
SMALL_BITS = {2: 4, 3: 3}
"""Bits of the grid that is visited as a whole, by its number of axes: 16 and 8 cells a side."""
TRIAL = 2048
"""Points of the calls that decide how many a package gets."""
STRETCH = 256
"""Cells that are visited in the middle of a larger curve."""
Findings = dict[str, bool]
"""Statements about a result, and whether each is true."""


class Contender(NamedTuple):
    """An implementation of a case: `make(count)` is its call for so many points, `check(count, result)` checks the result.

    `package`: another's, which gets fewer points where all of them would take longer than the budget.
    """

    make: Callable[[int], Call]
    check: Callable[[int, Any], Findings]
    package: bool = False


Contenders = dict[str, Contender]


def compare(
    table: str, case: dict[str, Any], most: int, contenders: Contenders, repeats: int, budget: float, min_time: float
) -> list[Row]:
    """Check all contenders, and time those that are right in turns, on at most so many points.

    `budget`: seconds of a call; `min_time`: of a sample.
    """
    rows, calls = [], {}
    for who, (make, check, package) in contenders.items():
        try:
            few = count = min(TRIAL, most) if package else most
            if few < most:
                count = min(most, max(few, int(budget * few / seconds_of(make(few)))))
            call = make(count)
            rows.append(row(table, case, who, check(count, call()), points=count))
            calls[who] = call
        except Exception as error:
            rows.append(Row(table=table, case=case, who=who, verdict="failed", reasons=(error_line(error),)))
    right = {one.who: calls[one.who] for one in rows if one.verdict == "measured"}
    return timed(rows, time_interleaved(right, repeats, min_time=min_time))


def row(table: str, case: dict[str, Any], who: str, findings: Findings, **values: Any) -> Row:
    """The row of an implementation before it is timed."""
    wrong = tuple(f"not so: {what}" for what, passed in findings.items() if not passed)
    values |= dict(checked=list(findings)) if findings else {}
    return Row(table=table, case=case, who=who, verdict="wrong" if wrong else "measured", reasons=wrong, values=values)


def timed(rows: list[Row], times: Mapping[str, Samples]) -> list[Row]:
    """`rows` with their samples, those with `points` as seconds for a million points."""
    complete = []
    for one in rows:
        if one.verdict == "measured":
            scale, samples = 1e6 / one.values.get("points", 1e6), times[one.who]
            one = replace(one, samples=tuple(scale * sample for sample in samples.samples_s), calls=samples.calls_per_sample)
        complete.append(one)
    return complete


def permutation(shape: tuple[int, ...], dtype: str, packages: Sequence[HilbertCurve]) -> Contenders:
    """The whole curve through a grid, beside a store loop into the same array."""
    out, ndim, bits = np.zeros(prod(shape), dtype), len(shape), (max(shape) - 1).bit_length()

    def check(who: HilbertCurve, count: int, cells: Array) -> Findings:
        decoded = row_major(axes_of(who.decoder(np.arange(count), ndim, bits)()), bits, np.zeros(count, dtype))
        return visits(cells, shape) | same("equal to decode of 0, 1, 2, ...", cells, decoded)

    if is_power_of_two_cube(shape):
        curves = [Dilkit(), *packages]
        contenders = _contenders(curves, ndim, bits, lambda who, count: who.permutation(ndim, bits, out[:count]), check)
    else:  # packages have codes on cubes of a power of two alone: sorted codes are a curve with jumps
        call = filling(out, _generalised_hilbert.generalised_hilbert, shape, 1)
        cells = np.stack(np.unravel_index(np.arange(len(out)), shape))
        ours = Contender(lambda _: call, lambda _, cells: visits(cells, shape))
        contenders = {Dilkit.name: ours, **_sorters(cells, bits, packages)}
    loop = Contender(lambda _: filling(out, _curves.row_major), lambda n, x: same("out[i] is i", x, np.arange(n)))
    return contenders | {STORE_LOOP: loop}


def rank(shape: Sequence[int], packages: Sequence[HilbertCurve]) -> Contenders:
    """The position on the curve of each cell of a cube, the cells in row-major order; and the inverse of the permutation."""
    ndim, bits = len(shape), (shape[0] - 1).bit_length()
    perm = Dilkit().permutation(ndim, bits, np.zeros(prod(shape), np.int32))()
    invert = filling(np.zeros_like(perm), lambda out: _curves.invert(perm, out))

    def check(who: HilbertCurve, count: int, codes: Array) -> Findings:
        cells = row_major(axes_of(who.decoder(np.asarray(codes), ndim, bits)()), bits, np.zeros(count, np.int32))
        return same("decode gives the cells back", cells, np.arange(count))

    ranks = _contenders([Dilkit(), *packages], ndim, bits, lambda who, count: who.ranks(ndim, bits, count), check)
    inverted = Contender(lambda _: invert, lambda n, inverse: same("rank[perm] is 0, 1, 2, ...", inverse[perm], np.arange(n)))
    return ranks | {f"{Dilkit.name}, inverted": inverted}


def encode(axes: Array, bits: int, packages: Sequence[HilbertCurve]) -> Contenders:
    """Codes of points."""

    def check(who: HilbertCurve, count: int, codes: Array) -> Findings:
        decoded = axes_of(who.decoder(np.asarray(codes), len(axes), bits)())
        return same("decode gives the points back", np.stack(decoded), axes[:, :count])

    curves = [Dilkit(), Interleaved(), *packages]
    return _contenders(curves, len(axes), bits, lambda who, count: who.encoder(axes[:, :count], bits), check)


def decode(codes: Array, ndim: int, bits: int, packages: Sequence[HilbertCurve]) -> Contenders:
    """Points of codes."""

    def check(who: HilbertCurve, count: int, decoded: Any) -> Findings:
        return same("encode gives the codes back", who.encoder(np.stack(axes_of(decoded)), bits)(), codes[:count])

    curves = [Dilkit(), Interleaved(), *packages]
    return _contenders(curves, ndim, bits, lambda who, count: who.decoder(codes[:count], ndim, bits), check)


def sort(axes: Array, packages: Sequence[HilbertCurve]) -> Contenders:
    """The order of points along the curve; beside it, NumPy's stable sort of dilkit's codes."""
    axes = axes - axes.min(1, keepdims=True)  # sort_points does so too
    bits = max(1, int(axes.max()).bit_length())
    sorters = _sorters(axes, bits, [Dilkit(), *packages])
    argsort = Contender(lambda n: HilbertCurve.sorter(Dilkit(), axes[:, :n], bits), sorters[Dilkit.name].check)
    return sorters | {"np.argsort": argsort}


def _sorters(axes: Array, bits: int, curves: Sequence[HilbertCurve]) -> Contenders:
    def check(who: HilbertCurve, count: int, order: Any) -> Findings:
        return sorts(permutation_of(order), np.asarray(who.encoder(axes[:, :count], bits)()))

    return _contenders(curves, len(axes), bits, lambda who, count: who.sorter(axes[:, :count], bits), check)


def _contenders(
    curves: Sequence[HilbertCurve],
    ndim: int,
    bits: int,
    make: Callable[[HilbertCurve, int], Call],
    check: Callable[[HilbertCurve, int, Any], Findings],
) -> Contenders:
    """Contenders by name; of each it is checked first that its codes are positions on a Hilbert curve."""

    def checked(who: HilbertCurve, count: int, result: Any) -> Findings:
        return is_hilbert_curve(who, ndim, bits) | check(who, count, result)

    ours = Dilkit.name, Interleaved.name
    return {who.name: Contender(partial(make, who), partial(checked, who), who.name not in ours) for who in curves}


def is_hilbert_curve(who: HilbertCurve, ndim: int, bits: int) -> Findings:
    """Check a small grid as a whole, and a stretch in the middle of the curve of `bits`."""
    small = SMALL_BITS[ndim]
    codes = np.arange(1 << ndim * small)
    cells = np.stack(axes_of(who.decoder(codes, ndim, small)()))
    once = np.unique(cells, axis=1).shape == cells.shape and bool(cells.max() < 1 << small)
    middle, half = 1 << ndim * bits - 1, min(STRETCH, 1 << ndim * bits) // 2
    stretch = axes_of(who.decoder(np.arange(middle - half, middle + half), ndim, bits)())
    return {
        f"the cells of 0, 1, 2, ... are each cell of a small {ndim}-D grid once": once,
        "they are a step of one cell apart": _jumps(cells) == 0,
        **same("their codes are 0, 1, 2, ...", who.encoder(cells, small)(), codes),
        f"cells in the middle of the curve of {bits} bits are a step of one cell apart": _jumps(stretch) == 0,
    }


def visits(indices: Array, shape: Sequence[int]) -> Findings:
    """Check that row-major `indices` are distinct cells of the grid, all of them if there are as many, by steps of one cell.

    A curve may have to jump where a side is odd: then the number of jumps is only reported.
    """
    seen = np.zeros(prod(shape), bool)
    seen[indices] = True
    jumps = _jumps(np.unravel_index(indices, tuple(shape)))
    return {
        f"{len(indices):,} of {len(seen):,} cells are visited, each once": int(seen.sum()) == len(indices),
        f"steps that are not of one cell: {jumps}": jumps == 0 or any(side % 2 for side in shape),
    }


def sorts(permutation: Array, codes: Array) -> Findings:
    """Check that `permutation` puts `codes` into ascending order."""
    once = np.array_equal(np.sort(permutation), np.arange(len(codes)))
    ascending = once and bool((np.diff(codes[permutation].astype(np.int64)) >= 0).all())
    return {"each point occurs once": once, "its codes ascend": ascending}


def same(what: str, left: Any, right: Array) -> Findings:
    """Check that two results are the same."""
    return {what: np.array_equal(np.asarray(left), right)}


def _jumps(axes: Iterable[Array]) -> int:
    """Count the cells that do not follow the one before by a step of one cell."""
    lengths = sum(np.abs(np.diff(axis.astype(np.int32))) for axis in axes)
    return int(np.count_nonzero(lengths != 1))


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

    def absent(self) -> str | None:
        """Return why the package cannot take part, None where it can."""
        if self.version() is None:
            return f"not installed: {self.needs}"
        try:
            importlib.import_module(self.module)
        except Exception as error:
            return f"cannot be imported: {type(error).__name__}: {error}"
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
        return partial(points.sort_points, np.ascontiguousarray(axes.T))


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


def permutation_of(order: Any) -> Array:
    """Return the permutation of sorted points; it is that, or a token order."""
    return np.asarray(getattr(order, "perm", order))


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
