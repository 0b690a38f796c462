"""Hilbert curves behind one interface: dilkit's engines, and optional packages that are compared with them.

A package computes codes and coordinates on a cube whose sides are a power of two. Missing functions are put together here in the
fastest way found: a permutation from decoded coordinates, the order of points from sorted codes. Coordinates are `(ndim, n)`, or
a tuple of ndim arrays `(n,)`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilkit.orders import points
from dilkit.orders.compiled import _curves

Array = NDArray[Any]


@dataclass(frozen=True)
class Task:
    """A call to be timed, whose inputs and buffers were made before.

    `read` brings its result into the common form: codes `(n,)`, coordinates, row-major indices `(n,)`, or a permutation `(n,)`.
    """

    call: Callable[[], Any]
    read: Callable[[Any], Any] = np.asarray

    def result(self) -> Any:
        """Return the result of one call in the common form."""
        return self.read(self.call())

    def seconds(self) -> float:
        """Return the fastest of three calls after a first one, in which a package may still compile."""
        self.call()
        taken = []
        for _ in range(3):
            start = perf_counter()
            self.call()
            taken.append(perf_counter() - start)
        return min(taken)


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
    def encoder(self, axes: Array, bits: int) -> Task:
        """Compute the codes of points, all coordinates below `2**bits`."""

    @abstractmethod
    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        """Compute the coordinates of the points with these codes."""

    def permutation(self, ndim: int, bits: int, out: Array) -> Task:
        """Compute the row-major indices of the first `len(out)` cells of the curve through a grid of `2**bits` a side."""
        decode = self.decoder(np.arange(len(out), dtype=np.uint32), ndim, bits)
        return Task(lambda: row_major(decode.result(), bits, out))

    def ranks(self, ndim: int, bits: int, count: int) -> Task:
        """Compute the codes of the first `count` cells of that grid, in row-major order."""
        return self.encoder(np.stack(np.unravel_index(np.arange(count), (1 << bits,) * ndim)), bits)

    def sorter(self, axes: Array, bits: int) -> Task:
        """Compute the permutation that puts points into the order of their codes."""
        encode = self.encoder(axes, bits)
        return Task(lambda: np.argsort(encode.result(), kind="stable"))


class Dilkit(HilbertCurve):
    """The engines on one thread. Results go into arrays that were written to before; coordinates are an array an axis."""

    name, module, summary = "dilkit", "dilkit", "the engines of dilkit.order, encode, decode and sort_points"

    def encoder(self, axes: Array, bits: int) -> Task:
        out = np.zeros(len(axes[0]), np.uint32)
        return Task(partial(points.encode, tuple(axes.astype(_narrow(bits))), bits, out=out))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        out = tuple(np.zeros((ndim, len(codes)), _narrow(bits)))
        return Task(partial(points.decode, codes.astype(np.uint32), ndim, bits, out=out), tuple)

    def permutation(self, ndim: int, bits: int, out: Array) -> Task:
        return filling(out, _curves.hilbert, ndim, bits, 1)

    def ranks(self, ndim: int, bits: int, count: int) -> Task:
        return filling(np.zeros(count, np.int32), _curves.hilbert_rank, ndim, bits, 1)

    def sorter(self, axes: Array, bits: int) -> Task:
        return Task(partial(points.sort_points, np.ascontiguousarray(axes.T)), lambda order: order.perm)


class Interleaved(Dilkit):
    """The engines with coordinates `(n, ndim)`, point by point."""

    name = "dilkit, (n, ndim)"

    def encoder(self, axes: Array, bits: int) -> Task:
        coords = np.ascontiguousarray(axes.T.astype(_narrow(bits)))
        return Task(partial(points.encode, coords, bits, out=np.zeros(len(coords), np.uint32)))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        out = np.zeros((len(codes), ndim), _narrow(bits))
        return Task(partial(points.decode, codes.astype(np.uint32), ndim, bits, out=out), np.transpose)


class NumpyHilbertCurve(HilbertCurve):
    """Skilling's transform on arrays of bits."""

    name, module = "numpy-hilbert-curve", "hilbert"
    summary = "Skilling's transform, vectorised in NumPy over arrays of single bits"

    def encoder(self, axes: Array, bits: int) -> Task:
        return Task(partial(self.function("encode"), np.ascontiguousarray(axes.T, np.int64), len(axes), bits))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        return Task(partial(self.function("decode"), codes.astype(np.int64), ndim, bits), _axes)


class HilbertCurvePackage(HilbertCurve):
    """Skilling's transform on Python integers: it is fastest with lists."""

    name, module = "hilbertcurve", "hilbertcurve.hilbertcurve"
    summary = "Skilling's transform, point by point in Python; lists in, lists out"

    def encoder(self, axes: Array, bits: int) -> Task:
        return Task(partial(self.function("HilbertCurve")(bits, len(axes)).distances_from_points, axes.T.tolist()))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        return Task(partial(self.function("HilbertCurve")(bits, ndim).points_from_distances, codes.tolist()), _axes)


class HilbertSFC(HilbertCurve):
    """Tables and SIMD, compiled by numba when first called."""

    name, module = "hilbertsfc", "hilbertsfc"
    summary = (
        "tables and SIMD compiled by numba; an array an axis, results into given buffers, already compiled; permutations by "
        "decode and NumPy or by its kernel in a numba loop, whichever is faster"
    )
    needs = "Python 3.12 or newer, and pip install dilkit[peers]"

    def encoder(self, axes: Array, bits: int) -> Task:
        out = np.zeros(len(axes[0]), np.uint32)
        return Task(partial(self.function(f"hilbert_encode_{len(axes)}d"), *axes.astype(_narrow(bits)), nbits=bits, out=out))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        outs = {f"out_{axis}": np.zeros(len(codes), _narrow(bits)) for axis in "xyz"[:ndim]}
        return Task(partial(self.function(f"hilbert_decode_{ndim}d"), codes.astype(np.uint32), nbits=bits, **outs), tuple)

    def permutation(self, ndim: int, bits: int, out: Array) -> Task:
        """Use its kernel for one point, compiled into a loop over all, where that is faster."""
        kernel = self.function(f"get_hilbert_decode_{ndim}d_kernel")(bits)

        def fill(out: Array) -> None:
            for d in range(out.shape[0]):
                index = 0
                for axis in kernel(d):
                    index = (index << bits) | axis
                out[d] = index

        loop = Task(partial(importlib.import_module("numba").njit(fill), out), lambda _: out)
        return min(super().permutation(ndim, bits, out), loop, key=Task.seconds)


PACKAGES: tuple[HilbertCurve, ...] = (NumpyHilbertCurve(), HilbertCurvePackage(), HilbertSFC())


def filling(out: Array, engine: Any, *arguments: Any) -> Task:
    """Make the task of an engine that writes to `out`."""
    return Task(partial(engine, out, *arguments), lambda _: out)


def row_major(axes: Any, bits: int, out: Array) -> Array:
    """Write the row-major indices of cells in a grid of `2**bits` a side to `out`."""
    out[:] = axes[0]
    for axis in axes[1:]:
        np.left_shift(out, bits, out=out)
        np.bitwise_or(out, axis, out=out)
    return out


def _narrow(bits: int) -> type[np.unsignedinteger[Any]]:
    return np.uint8 if bits <= 8 else np.uint16


def _axes(rows: Any) -> Array:
    return np.asarray(rows).astype(np.int64, copy=False).T
