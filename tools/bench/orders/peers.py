"""Packages that compute Hilbert curves, behind one interface. They are optional.

A package computes codes and coordinates on a cube whose sides are a power of two. What it has no function for is put together
here from what it has, in the fastest way found: a permutation from decoded coordinates, the order of points from sorted codes.
"""

from __future__ import annotations

import importlib
import platform
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, reduce
from importlib import metadata
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilkit.tools.results.kinds.orders import Package

Array = NDArray[Any]


@dataclass(frozen=True)
class Task:
    """Work to be timed: `call()`, with inputs and, where a package takes them, buffers made before.

    `read` brings what it returns into the common form: codes `(n,)`, coordinates `(n, ndim)` with the first axis first,
    row-major indices `(n,)`, or a permutation `(n,)`.
    """

    call: Callable[[], Any]
    read: Callable[[Any], Array] = np.asarray

    def result(self) -> Array:
        """What one call computes, in the common form."""
        return self.read(self.call())


class Peer(ABC):
    """A package with a Hilbert curve. `python` is the oldest Python it runs on."""

    name: str
    module: str
    summary: str
    python: tuple[int, int] = (3, 10)

    def version(self) -> str | None:
        """The installed version, None where it is not installed."""
        try:
            return metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return None

    def absent(self) -> str | None:
        """Why the package cannot take part; None when it can."""
        if self.version() is None:
            needs = f"it needs Python {self.python[0]}.{self.python[1]} or newer, this is {platform.python_version()}"
            return f"not installed: {needs if sys.version_info < self.python else 'pip install dilkit[peers]'}"
        try:
            importlib.import_module(self.module)
        except Exception as error:
            return f"cannot be imported: {type(error).__name__}: {error}"
        return None

    @abstractmethod
    def encoder(self, coords: Array, bits: int) -> Task:
        """The codes of the points `coords`, `(n, ndim)`, all below `2**bits`."""

    @abstractmethod
    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        """The coordinates of the points with these codes."""

    def permutation(self, ndim: int, bits: int, count: int, dtype: str) -> Task:
        """The row-major indices of the first `count` cells of the curve through a grid of `2**bits` a side."""
        decode = self.decoder(np.arange(count, dtype=np.uint32), ndim, bits)
        return Task(lambda: row_major(decode.result().T, bits, dtype))

    def ranks(self, ndim: int, bits: int, count: int) -> Task:
        """The codes of the first `count` cells of that grid, in row-major order."""
        cells = np.arange(count, dtype=np.uint32)
        return self.encoder(np.stack(np.unravel_index(cells, (1 << bits,) * ndim), 1).astype(np.uint16), bits)

    def sorter(self, coords: Array, bits: int) -> Task:
        """The permutation that puts points into the order of their codes."""
        encode = self.encoder(coords, bits)
        return Task(lambda: np.argsort(encode.result(), kind="stable"))


def row_major(axes: Iterable[Any], bits: int, dtype: str) -> Array:
    """The row-major index of cells in a grid of `2**bits` a side, given their coordinates, axis by axis."""
    return reduce(lambda index, axis: (index << bits) | axis, (np.asarray(axis).astype(dtype) for axis in axes))


class NumpyHilbertCurve(Peer):
    """Skilling's transform on arrays of bits."""

    name, module = "numpy-hilbert-curve", "hilbert"
    summary = "Skilling's transform, vectorised in NumPy over arrays of single bits"

    def encoder(self, coords: Array, bits: int) -> Task:
        hilbert = importlib.import_module(self.module)
        return Task(partial(hilbert.encode, coords.astype(np.int64), coords.shape[1], bits))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        hilbert = importlib.import_module(self.module)
        return Task(partial(hilbert.decode, codes.astype(np.int64), ndim, bits))


class HilbertCurvePackage(Peer):
    """Skilling's transform on Python integers: it is fastest with lists."""

    name, module = "hilbertcurve", "hilbertcurve.hilbertcurve"
    summary = "Skilling's transform, point by point in Python; lists in, lists out"

    def encoder(self, coords: Array, bits: int) -> Task:
        curve = importlib.import_module(self.module).HilbertCurve(bits, coords.shape[1])
        return Task(partial(curve.distances_from_points, coords.tolist()))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        curve = importlib.import_module(self.module).HilbertCurve(bits, ndim)
        return Task(partial(curve.points_from_distances, codes.tolist()))


class HilbertSFC(Peer):
    """Tables and SIMD, compiled by numba when first called."""

    name, module = "hilbertsfc", "hilbertsfc"
    summary = (
        "tables and SIMD compiled by numba; an array an axis, results into given buffers, already compiled; permutations by "
        "decode and NumPy or by its kernel in a numba loop, whichever is faster"
    )
    python = (3, 12)

    def encoder(self, coords: Array, bits: int) -> Task:
        encode = getattr(importlib.import_module(self.module), f"hilbert_encode_{coords.shape[1]}d")
        axes = np.ascontiguousarray(coords.T.astype(narrow(bits)))
        return Task(partial(encode, *axes, nbits=bits, out=np.zeros(len(coords), np.uint32)))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        decode = getattr(importlib.import_module(self.module), f"hilbert_decode_{ndim}d")
        outs = {f"out_{axis}": np.zeros(len(codes), narrow(bits)) for axis in "xyz"[:ndim]}
        return Task(partial(decode, codes.astype(np.uint32), nbits=bits, **outs), lambda axes: np.stack(axes, 1))

    def permutation(self, ndim: int, bits: int, count: int, dtype: str) -> Task:
        decode = self.decoder(np.arange(count, dtype=np.uint32), ndim, bits)
        out = np.zeros(count, dtype)
        forms = (
            Task(lambda: _row_major_into(out, decode.call(), bits)),
            Task(partial(self._loop(ndim, bits), out), lambda _: out),
        )
        return min(forms, key=seconds)

    def _loop(self, ndim: int, bits: int) -> Callable[[Array], None]:
        """The kernel for one point, compiled into a loop that makes row-major indices of the points."""
        kernel = getattr(importlib.import_module(self.module), f"get_hilbert_decode_{ndim}d_kernel")(bits)

        def fill(out: Array) -> None:
            for d in range(out.shape[0]):
                index = 0
                for axis in kernel(d):
                    index = (index << bits) | axis
                out[d] = index

        compiled: Callable[[Array], None] = importlib.import_module("numba").njit(fill)
        return compiled


def narrow(bits: int) -> type[np.unsignedinteger[Any]]:
    """The narrowest type for coordinates of so many bits."""
    return np.uint8 if bits <= 8 else np.uint16


def _row_major_into(out: Array, axes: Iterable[Array], bits: int) -> Array:
    first, *others = axes
    out[:] = first
    for axis in others:
        np.left_shift(out, bits, out=out)
        np.bitwise_or(out, axis, out=out)
    return out


def seconds(task: Task) -> float:
    """The fastest of three calls after a first one, in which a package may still compile."""
    task.call()
    taken = []
    for _ in range(3):
        start = perf_counter()
        task.call()
        taken.append(perf_counter() - start)
    return min(taken)


PEERS: tuple[Peer, ...] = (NumpyHilbertCurve(), HilbertCurvePackage(), HilbertSFC())


def describe() -> tuple[Package, ...]:
    """Each package: what it computes, its version, and why it is absent where it is."""
    return tuple(Package(name=p.name, summary=p.summary, version=p.version(), absent=p.absent()) for p in PEERS)


def present() -> list[Peer]:
    """The packages that can take part."""
    return [peer for peer in PEERS if peer.absent() is None]
