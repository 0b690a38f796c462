"""dilkit's own curves, behind the interface of the packages that they are compared with."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from dilkit.tools.bench.orders.peers import Array, Peer, Task, narrow


class Dilkit(Peer):
    """The engines on one thread. Results go into arrays made, and written to, before; coordinates are an array an axis."""

    name, module = "dilkit", "dilkit"
    summary = "the engines of dilkit.order, encode, decode and sort_points"

    def encoder(self, coords: Array, bits: int) -> Task:
        from dilkit.orders import points

        axes = tuple(np.ascontiguousarray(coords.T.astype(narrow(bits))))
        return Task(partial(points.encode, axes, bits, out=np.zeros(len(coords), np.uint32)))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        from dilkit.orders import points

        axes = tuple(np.zeros((ndim, len(codes)), narrow(bits)))
        return Task(partial(points.decode, codes.astype(np.uint32), ndim, bits, out=axes), lambda axes: np.stack(axes, 1))

    def walker(self, ndim: int, bits: int, count: int, dtype: str, out: Array | None = None) -> Task:
        from dilkit.orders import _curves

        out = np.zeros(count, dtype) if out is None else out
        return _filling(out, _curves.hilbert, ndim, bits, 1)

    def ranker(self, ndim: int, bits: int, count: int) -> Task:
        from dilkit.orders import _curves

        out = np.zeros(count, np.int32)
        return _filling(out, _curves.hilbert_rank, ndim, bits, 1)

    def inverter(self, perm: Array) -> Task:
        """The inverse of `perm`."""
        from dilkit.orders import _curves

        out = np.zeros_like(perm)
        return Task(partial(_curves.invert, perm, out), lambda _: out)

    def rambler(self, shape: tuple[int, ...], out: Array) -> Task:
        """The generalised curve through a grid of any shape."""
        from dilkit.orders import _generalised_hilbert

        return _filling(out, _generalised_hilbert.generalised_hilbert, shape, 1)

    def sorter(self, coords: Array, bits: int) -> Task:
        from dilkit.orders import points

        return Task(partial(points.sort_points, coords), lambda order: order.perm)


class Interleaved(Dilkit):
    """dilkit with coordinates `(n, ndim)`, point by point."""

    name = "dilkit, (n, ndim)"

    def encoder(self, coords: Array, bits: int) -> Task:
        from dilkit.orders import points

        return Task(partial(points.encode, coords.astype(narrow(bits)), bits, out=np.zeros(len(coords), np.uint32)))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        from dilkit.orders import points

        out = np.zeros((len(codes), ndim), narrow(bits))
        return Task(partial(points.decode, codes.astype(np.uint32), ndim, bits, out=out))


def store_loop(out: Array) -> Task:
    """`out[i] = i`, a compiled loop."""
    from dilkit.orders import _curves

    return _filling(out, _curves.row_major)


def _filling(out: Array, engine: Any, *arguments: Any) -> Task:
    return Task(partial(engine, out, *arguments), lambda _: out)


def instruction_set() -> str:
    """Whose code encodes and decodes."""
    from dilkit.orders import points

    return str(points.instruction_set())
