"""dilkit's own curves, behind the interface of the packages that they are compared with."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from dilkit.orders import _curves, _generalised_hilbert, points
from dilkit.tools.bench.orders.peers import Array, Peer, Task, narrow
from dilkit.tools.results.kinds.orders import OURS


class Dilkit(Peer):
    """The engines on one thread. Results go into arrays made, and written to, before; coordinates are an array an axis."""

    name, module = OURS, "dilkit"
    summary = "the engines of dilkit.order, encode, decode and sort_points"

    def encoder(self, coords: Array, bits: int) -> Task:
        axes = tuple(np.ascontiguousarray(coords.T.astype(narrow(bits))))
        return Task(partial(points.encode, axes, bits, out=np.zeros(len(coords), np.uint32)))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        axes = tuple(np.zeros((ndim, len(codes)), narrow(bits)))
        return Task(partial(points.decode, codes.astype(np.uint32), ndim, bits, out=axes), lambda axes: np.stack(axes, 1))

    def permutation(self, ndim: int, bits: int, count: int, dtype: str, out: Array | None = None) -> Task:
        return _filling(np.zeros(count, dtype) if out is None else out, _curves.hilbert, ndim, bits, 1)

    def ranks(self, ndim: int, bits: int, count: int) -> Task:
        return _filling(np.zeros(count, np.int32), _curves.hilbert_rank, ndim, bits, 1)

    def inverse(self, perm: Array) -> Task:
        """The inverse of `perm`."""
        out = np.zeros_like(perm)
        return Task(partial(_curves.invert, perm, out), lambda _: out)

    def generalised(self, shape: tuple[int, ...], out: Array) -> Task:
        """The generalised curve through a grid of any shape."""
        return _filling(out, _generalised_hilbert.generalised_hilbert, shape, 1)

    def sorter(self, coords: Array, bits: int) -> Task:
        return Task(partial(points.sort_points, coords), lambda order: order.perm)


class Interleaved(Dilkit):
    """dilkit with coordinates `(n, ndim)`, point by point."""

    name = f"{OURS}, (n, ndim)"

    def encoder(self, coords: Array, bits: int) -> Task:
        return Task(partial(points.encode, coords.astype(narrow(bits)), bits, out=np.zeros(len(coords), np.uint32)))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        out = np.zeros((len(codes), ndim), narrow(bits))
        return Task(partial(points.decode, codes.astype(np.uint32), ndim, bits, out=out))


def store_loop(out: Array) -> Task:
    """`out[i] = i`, a compiled loop."""
    return _filling(out, _curves.row_major)


def _filling(out: Array, engine: Any, *arguments: Any) -> Task:
    return Task(partial(engine, out, *arguments), lambda _: out)
