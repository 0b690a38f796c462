"""Packages that compute Hilbert curves, behind one interface. They are optional.

A package computes codes and coordinates on a cube whose sides are a power of two. What it has no function for is put together
here from what it has, in the fastest way found: a permutation from decoded coordinates, the order of points from sorted codes.
Coordinates are axes, the first one first: `(ndim, n)`, or a tuple of so many arrays.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilkit.tools.bench.orders.record import Package

Array = NDArray[Any]


@dataclass(frozen=True)
class Task:
    """Work to be timed: `call()`, with inputs and, where a package takes them, buffers made before.

    `read` brings what it returns into the common form: codes `(n,)`, axes, row-major indices `(n,)`, or a permutation `(n,)`.
    """

    call: Callable[[], Any]
    read: Callable[[Any], Any] = np.asarray

    def result(self) -> Any:
        """What one call computes, in the common form."""
        return self.read(self.call())

    def seconds(self) -> float:
        """The fastest of three calls after a first one, in which a package may still compile."""
        self.call()
        taken = []
        for _ in range(3):
            start = perf_counter()
            self.call()
            taken.append(perf_counter() - start)
        return min(taken)


class Peer(ABC):
    """A package with a Hilbert curve. `needs`: what installs it."""

    name: str
    module: str
    summary: str
    needs: str = "pip install dilkit[peers]"

    def version(self) -> str | None:
        """The installed version, None where it is not installed."""
        try:
            return metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return None

    def absent(self) -> str | None:
        """Why the package cannot take part; None when it can."""
        if self.version() is None:
            return f"not installed: {self.needs}"
        try:
            importlib.import_module(self.module)
        except Exception as error:
            return f"cannot be imported: {type(error).__name__}: {error}"
        return None

    def has(self, name: str) -> Any:
        """A function or class of the package."""
        return getattr(importlib.import_module(self.module), name)

    @abstractmethod
    def encoder(self, axes: Array, bits: int) -> Task:
        """The codes of points, all coordinates below `2**bits`."""

    @abstractmethod
    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        """The coordinates of the points with these codes."""

    def permutation(self, ndim: int, bits: int, out: Array) -> Task:
        """The row-major indices of the first cells of the curve through a grid of `2**bits` a side, as many as `out` holds."""
        decode = self.decoder(np.arange(len(out), dtype=np.uint32), ndim, bits)
        return Task(lambda: row_major(decode.result(), bits, out))

    def ranks(self, ndim: int, bits: int, count: int) -> Task:
        """The codes of the first `count` cells of that grid, in row-major order."""
        return self.encoder(np.stack(np.unravel_index(np.arange(count), (1 << bits,) * ndim)), bits)

    def sorter(self, axes: Array, bits: int) -> Task:
        """The permutation that puts points into the order of their codes."""
        encode = self.encoder(axes, bits)
        return Task(lambda: np.argsort(encode.result(), kind="stable"))


def row_major(axes: Any, bits: int, out: Array) -> Array:
    """The row-major index of cells in a grid of `2**bits` a side, written to `out`."""
    out[:] = axes[0]
    for axis in axes[1:]:
        np.left_shift(out, bits, out=out)
        np.bitwise_or(out, axis, out=out)
    return out


def narrow(bits: int) -> type[np.unsignedinteger[Any]]:
    """The narrowest type for coordinates of so many bits."""
    return np.uint8 if bits <= 8 else np.uint16


def _axes(points: Any) -> Array:
    return np.asarray(points).astype(np.int64, copy=False).T


class NumpyHilbertCurve(Peer):
    """Skilling's transform on arrays of bits."""

    name, module = "numpy-hilbert-curve", "hilbert"
    summary = "Skilling's transform, vectorised in NumPy over arrays of single bits"

    def encoder(self, axes: Array, bits: int) -> Task:
        return Task(partial(self.has("encode"), np.ascontiguousarray(axes.T, np.int64), len(axes), bits))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        return Task(partial(self.has("decode"), codes.astype(np.int64), ndim, bits), _axes)


class HilbertCurvePackage(Peer):
    """Skilling's transform on Python integers: it is fastest with lists."""

    name, module = "hilbertcurve", "hilbertcurve.hilbertcurve"
    summary = "Skilling's transform, point by point in Python; lists in, lists out"

    def encoder(self, axes: Array, bits: int) -> Task:
        return Task(partial(self.has("HilbertCurve")(bits, len(axes)).distances_from_points, axes.T.tolist()))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        return Task(partial(self.has("HilbertCurve")(bits, ndim).points_from_distances, codes.tolist()), _axes)


class HilbertSFC(Peer):
    """Tables and SIMD, compiled by numba when first called."""

    name, module = "hilbertsfc", "hilbertsfc"
    summary = (
        "tables and SIMD compiled by numba; an array an axis, results into given buffers, already compiled; permutations by "
        "decode and NumPy or by its kernel in a numba loop, whichever is faster"
    )
    needs = "Python 3.12 or newer, and pip install dilkit[peers]"

    def encoder(self, axes: Array, bits: int) -> Task:
        out = np.zeros(len(axes[0]), np.uint32)
        return Task(partial(self.has(f"hilbert_encode_{len(axes)}d"), *axes.astype(narrow(bits)), nbits=bits, out=out))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        outs = {f"out_{axis}": np.zeros(len(codes), narrow(bits)) for axis in "xyz"[:ndim]}
        return Task(partial(self.has(f"hilbert_decode_{ndim}d"), codes.astype(np.uint32), nbits=bits, **outs), tuple)

    def permutation(self, ndim: int, bits: int, out: Array) -> Task:
        """By its kernel for one point, compiled into a loop over all, where that is faster."""
        kernel = self.has(f"get_hilbert_decode_{ndim}d_kernel")(bits)

        def fill(out: Array) -> None:
            for d in range(out.shape[0]):
                index = 0
                for axis in kernel(d):
                    index = (index << bits) | axis
                out[d] = index

        loop = Task(partial(importlib.import_module("numba").njit(fill), out), lambda _: out)
        return min(super().permutation(ndim, bits, out), loop, key=Task.seconds)


PEERS: tuple[Peer, ...] = (NumpyHilbertCurve(), HilbertCurvePackage(), HilbertSFC())


def describe(packages: Sequence[Peer]) -> tuple[Package, ...]:
    """Each package: what it computes, its version, and why it is absent where it is."""
    return tuple(Package(name=p.name, summary=p.summary, version=p.version(), absent=p.absent()) for p in packages)
