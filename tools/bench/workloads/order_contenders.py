"""Contenders of the suite of token orders: dilkit's engines and hilbertsfc."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dilkit.orders import points
from dilkit.orders.compiled import _curves
from dilkit.orders.curves import is_power_of_two_cube
from dilkit.tools.console.text import error_line
from dilkit.tools.measure.timing import Call, time_interleaved
from dilkit.tools.results.rows import ResultRow

Array = NDArray[Any]
STORE_LOOP = "store loop"
STRETCH = 256
"""Cells that are visited in the middle of a larger curve."""
SMALL_BITS = {2: 4, 3: 3}
"""Bits of the grid that is visited as a whole, by its number of axes: 16 and 8 cells a side."""
HilbertCurve: TypeAlias = "Dilkit | HilbertSFC"
Findings = dict[str, bool]
"""Statements about a result, and whether each is true."""


class Contender(NamedTuple):
    """An implementation of a case: `make()` is its call, `check(result)` checks the result."""

    make: Callable[[], Call]
    check: Callable[[Any], Findings]


Contenders = dict[str, Contender]


def compare(table: str, case: dict[str, Any], count: int, contenders: Contenders, **timing: Any) -> list[ResultRow]:
    """Check all contenders, and time those that are right in turns: seconds a call or, for `count` points, for a million of them.

    `timing`: as of `time_interleaved`.
    """
    rows, calls = dict[str, ResultRow](), dict[str, Call]()
    for who, (make, check) in contenders.items():
        try:
            call = make()
            findings = check(call())
        except Exception as error:
            rows[who] = ResultRow(table=table, case=case, who=who, verdict="failed", reasons=(error_line(error),))
            continue
        wrong = tuple(f"not so: {what}" for what, passed in findings.items() if not passed)
        values = dict(checked=list(findings)) | (dict(points=count) if count else {})
        rows[who] = ResultRow(
            table=table, case=case, who=who, verdict="wrong" if wrong else "measured", reasons=wrong, values=values
        )
        calls |= {} if wrong else {who: call}
    for who, samples in time_interleaved(calls, **timing).items():
        scaled = tuple(1e6 / (count or 1e6) * sample for sample in samples.samples)
        rows[who] = replace(rows[who], samples=scaled, calls=samples.calls)
    return [*rows.values()]


def permutation(shape: tuple[int, ...], packages: Sequence[HilbertCurve]) -> Contenders:
    """The whole curve through a grid, beside a store loop into the same array."""
    out, ndim, bits = np.zeros(prod(shape), np.int32), len(shape), (max(shape) - 1).bit_length()
    if is_power_of_two_cube(shape):
        make = lambda one: one.permutation(ndim, bits, out)  # noqa: E731
        contenders = _contenders([Dilkit(), *packages], ndim, bits, make, lambda one, cells: visits(cells, shape))
    else:
        call = filling(out, _curves.generalised_hilbert, shape)
        contenders = {Dilkit.name: Contender(lambda: call, lambda cells: visits(cells, shape))}
    loop = filling(out, _curves.row_major)
    stores = Contender(lambda: loop, lambda indices: same("out[i] is i", indices, np.arange(len(out))))
    return contenders | {STORE_LOOP: stores}


def encode(axes: Array, bits: int, packages: Sequence[HilbertCurve]) -> Contenders:
    def check(one: HilbertCurve, codes: Any) -> Findings:
        return same("decode gives the points back", np.stack(one.decoder(codes, len(axes), bits)()), axes)

    return _contenders([Dilkit(), *packages], len(axes), bits, lambda one: one.encoder(axes, bits), check)


def decode(codes: Array, ndim: int, bits: int, packages: Sequence[HilbertCurve]) -> Contenders:
    def check(one: HilbertCurve, cells: Any) -> Findings:
        return same("encode gives the codes back", one.encoder(np.stack(cells), bits)(), codes)

    return _contenders([Dilkit(), *packages], ndim, bits, lambda one: one.decoder(codes, ndim, bits), check)


def _contenders(
    curves: Sequence[HilbertCurve],
    ndim: int,
    bits: int,
    make: Callable[[HilbertCurve], Call],
    check: Callable[[HilbertCurve, Any], Findings],
) -> Contenders:
    """Return the contenders by name, once their codes are checked to be positions on a curve.

    A small grid is visited as a whole, and a stretch in the middle of the curve of `bits`.
    """

    def checked(one: HilbertCurve, result: Any) -> Findings:
        small = SMALL_BITS[ndim]
        codes = np.arange(1 << ndim * small)
        cells = one.decoder(codes, ndim, small)()
        visited = visits(row_major(cells, small, np.zeros(len(codes), np.int32)), (1 << small,) * ndim)
        middle, half = 1 << ndim * bits - 1, min(STRETCH, 1 << ndim * bits) // 2
        stretch = np.stack(one.decoder(np.arange(middle - half, middle + half), ndim, bits)())
        steps = np.abs(np.diff(stretch.astype(np.int64), axis=1)).sum(0)
        return (
            visited
            | {f"cells in the middle of the curve of {bits} bits are a step of one cell apart": bool((steps == 1).all())}
            | same("their codes are 0, 1, 2, ...", one.encoder(np.stack(cells), small)(), codes)
            | check(one, result)
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


def same(what: str, left: Any, right: Array) -> Findings:
    return {what: np.array_equal(np.asarray(left), right)}


class Dilkit:
    """The engines. Results go into arrays that were written to before."""

    name = "dilkit"

    def encoder(self, axes: Array, bits: int) -> Call:
        out = np.zeros(len(axes[0]), np.uint32)
        return partial(points.encode, tuple(axes.astype(_narrow(bits))), bits, out=out)

    def decoder(self, codes: Array, ndim: int, bits: int) -> Call:
        out = tuple(np.zeros((ndim, len(codes)), _narrow(bits)))
        return partial(points.decode, codes.astype(np.uint32), ndim, bits, out=out)

    def permutation(self, ndim: int, bits: int, out: Array) -> Call:
        return filling(out, _curves.hilbert, ndim, bits)


class HilbertSFC:
    """Tables and SIMD, compiled by numba when first called."""

    name = "hilbertsfc"

    def version(self) -> str | None:
        """Return the installed version, None where it is not installed."""
        try:
            return metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return None

    def encoder(self, axes: Array, bits: int) -> Call:
        out = np.zeros(len(axes[0]), np.uint32)
        return partial(_hilbertsfc(f"hilbert_encode_{len(axes)}d"), *axes.astype(_narrow(bits)), nbits=bits, out=out)

    def decoder(self, codes: Array, ndim: int, bits: int) -> Call:
        outs = {f"out_{axis}": np.zeros(len(codes), _narrow(bits)) for axis in "xyz"[:ndim]}
        return partial(_hilbertsfc(f"hilbert_decode_{ndim}d"), codes.astype(np.uint32), nbits=bits, **outs)

    def permutation(self, ndim: int, bits: int, out: Array) -> Call:
        """Use the faster of decode and NumPy, and of its kernel for one point, compiled into a loop over all."""
        decode = self.decoder(np.arange(len(out), dtype=np.uint32), ndim, bits)
        kernel = _hilbertsfc(f"get_hilbert_decode_{ndim}d_kernel")(bits)

        def fill(out: Array) -> None:
            for d in range(out.shape[0]):
                index = 0
                for axis in kernel(d):
                    index = (index << bits) | axis
                out[d] = index

        loop = filling(out, importlib.import_module("numba").njit(fill))
        calls: tuple[Call, ...] = (lambda: row_major(decode(), bits, out), loop)
        return min(calls, key=lambda call: min(time_interleaved({"": call}, repeats=3)[""].samples))


def _hilbertsfc(name: str) -> Any:
    return getattr(importlib.import_module("hilbertsfc"), name)


def filling(out: Array, engine: Any, *arguments: Any) -> Call:
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


def _narrow(bits: int) -> type[np.unsignedinteger[Any]]:
    return np.uint8 if bits <= 8 else np.uint16
