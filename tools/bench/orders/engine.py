"""dilkit's own curves, behind the interface of the packages that they are compared with."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from dilkit.orders import points
from dilkit.orders.compiled import _curves
from dilkit.tools.bench.orders.peers import Array, Peer, Task, narrow
from dilkit.tools.bench.orders.record import OURS


class Dilkit(Peer):
    """The engines on one thread. Results go into arrays made, and written to, before; coordinates are an array an axis."""

    name, module = OURS, "dilkit"
    summary = "the engines of dilkit.order, encode, decode and sort_points"

    def encoder(self, axes: Array, bits: int) -> Task:
        out = np.zeros(len(axes[0]), np.uint32)
        return Task(partial(points.encode, tuple(axes.astype(narrow(bits))), bits, out=out))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        out = tuple(np.zeros((ndim, len(codes)), narrow(bits)))
        return Task(partial(points.decode, codes.astype(np.uint32), ndim, bits, out=out), tuple)

    def permutation(self, ndim: int, bits: int, out: Array) -> Task:
        return filling(out, _curves.hilbert, ndim, bits, 1)

    def ranks(self, ndim: int, bits: int, count: int) -> Task:
        return filling(np.zeros(count, np.int32), _curves.hilbert_rank, ndim, bits, 1)

    def sorter(self, axes: Array, bits: int) -> Task:
        return Task(partial(points.sort_points, np.ascontiguousarray(axes.T)), lambda order: order.perm)


class Interleaved(Dilkit):
    """dilkit with coordinates `(n, ndim)`, point by point."""

    name = f"{OURS}, (n, ndim)"

    def encoder(self, axes: Array, bits: int) -> Task:
        coords = np.ascontiguousarray(axes.T.astype(narrow(bits)))
        return Task(partial(points.encode, coords, bits, out=np.zeros(len(coords), np.uint32)))

    def decoder(self, codes: Array, ndim: int, bits: int) -> Task:
        out = np.zeros((len(codes), ndim), narrow(bits))
        return Task(partial(points.decode, codes.astype(np.uint32), ndim, bits, out=out), np.transpose)


def filling(out: Array, engine: Any, *arguments: Any) -> Task:
    """An engine that writes to `out`."""
    return Task(partial(engine, out, *arguments), lambda _: out)
