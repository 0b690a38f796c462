"""Who computes each benchmark case of token orders, on which inputs, and what is checked of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import numpy as np

from dilkit.tools.bench.orders import checks
from dilkit.tools.bench.orders.checks import same
from dilkit.tools.bench.orders.engine import Dilkit, Interleaved, store_loop
from dilkit.tools.bench.orders.peers import Array, Peer, Task, present, row_major
from dilkit.tools.bench.orders.runner import Implementations, OrderImplementation
from dilkit.tools.bench.orders.targets import STORE_LOOP
from dilkit.tools.results.kinds.orders import OURS, Finding

ARGSORT = "np.argsort"


def permutation(shape: Sequence[int], dtype: str) -> Implementations:
    """The whole curve through a grid, beside a store loop into the same array; packages in int32 alone."""
    out = np.zeros(prod(shape), dtype)
    found = _cube(shape, out) if is_cube(shape) else _generalised(tuple(shape), out)
    loop = OrderImplementation(lambda _: store_loop(out), lambda n, x: same("out[i] is i", x, np.arange(n)))
    return found | {STORE_LOOP: loop}


def _cube(shape: Sequence[int], out: Array) -> Implementations:
    ndim, bits, dtype = len(shape), bits_of(shape), str(out.dtype)

    def check(count: int, cells: Array) -> list[Finding]:
        decoded = Dilkit().decoder(np.arange(count, dtype=np.uint32), ndim, bits).result()
        equal = same("equal to decode of 0, 1, 2, ...", cells, row_major(decoded.T, bits, dtype))
        return checks.visits(cells, shape) + equal

    def other(peer: Peer) -> OrderImplementation:
        def check(_: int, cells: Array) -> list[Finding]:
            return checks.curve(peer, ndim, bits) + checks.visits(cells, shape)

        return OrderImplementation(lambda count: peer.permutation(ndim, bits, count, dtype), check, whole=False)

    ours = OrderImplementation(lambda count: Dilkit().permutation(ndim, bits, count, dtype, out), check)
    return {OURS: ours} | (_packages(other) if dtype == "int32" else {})


def _generalised(shape: tuple[int, ...], out: Array) -> Implementations:
    """Packages have codes on cubes of a power of two alone: sorted codes are what they offer here, a curve with jumps."""
    ours = OrderImplementation(lambda _: Dilkit().generalised(shape, out), lambda _, cells: checks.visits(cells, shape))
    coords = np.stack(np.unravel_index(np.arange(len(out)), shape), 1).astype(np.uint16)
    others = _packages(partial(_sorter, coords=coords, bits=bits_of(shape))) if out.dtype == np.int32 else {}
    return {OURS: ours} | others


def rank(shape: Sequence[int]) -> Implementations:
    """The position on the curve of each cell of a cube, the cells in row-major order; and the inverse of the permutation."""
    ndim, bits = len(shape), bits_of(shape)
    perm = Dilkit().permutation(ndim, bits, prod(shape), "int32").result()

    def ranks(peer: Peer, whole: bool = False) -> OrderImplementation:
        def check(count: int, codes: Array) -> list[Finding]:
            cells = row_major(peer.decoder(codes, ndim, bits).result().T, bits, "int32")
            return checks.curve(peer, ndim, bits) + same("decode gives the cells back", cells, np.arange(count))

        return OrderImplementation(lambda count: peer.ranks(ndim, bits, count), check, whole)

    def inverted(count: int, found: Array) -> list[Finding]:
        return same("rank[perm] is 0, 1, 2, ...", found[perm], np.arange(count))

    inverse = OrderImplementation(lambda _: Dilkit().inverse(perm), inverted)
    return {OURS: ranks(Dilkit(), whole=True), f"{OURS}, inverted": inverse} | _packages(ranks)


def encode(coords: Array, bits: int) -> Implementations:
    """Codes of points."""

    def encoder(peer: Peer, whole: bool = False) -> OrderImplementation:
        def check(count: int, codes: Array) -> list[Finding]:
            back = peer.decoder(codes, coords.shape[1], bits).result()
            return checks.curve(peer, coords.shape[1], bits) + same("decode gives the points back", back, coords[:count])

        return OrderImplementation(lambda count: peer.encoder(coords[:count], bits), check, whole)

    return {ours.name: encoder(ours, whole=True) for ours in (Dilkit(), Interleaved())} | _packages(encoder)


def decode(codes: Array, ndim: int, bits: int) -> Implementations:
    """Points of codes."""

    def decoder(peer: Peer, whole: bool = False) -> OrderImplementation:
        def check(count: int, cells: Array) -> list[Finding]:
            back = peer.encoder(cells.astype(np.uint16), bits).result()
            return checks.curve(peer, ndim, bits) + same("encode gives the codes back", back, codes[:count])

        return OrderImplementation(lambda count: peer.decoder(codes[:count], ndim, bits), check, whole)

    return {ours.name: decoder(ours, whole=True) for ours in (Dilkit(), Interleaved())} | _packages(decoder)


def sort(coords: Array) -> Implementations:
    """The order of points along the curve; beside it, NumPy's stable sort of dilkit's codes."""
    coords = coords - coords.min(0)  # which sort_points does for itself
    bits = max(1, int(coords.max()).bit_length())
    ours = _sorter(Dilkit(), coords, bits, whole=True)

    def argsort(count: int) -> Task:
        return Peer.sorter(Dilkit(), coords[:count], bits)

    others = _packages(partial(_sorter, coords=coords, bits=bits))
    return {OURS: ours, ARGSORT: OrderImplementation(argsort, ours.check)} | others


def _sorter(peer: Peer, coords: Array, bits: int, whole: bool = False) -> OrderImplementation:
    def check(count: int, permutation: Array) -> list[Finding]:
        codes = peer.encoder(coords[:count], bits).result()
        return checks.curve(peer, coords.shape[1], bits) + checks.sorting(permutation, codes)

    return OrderImplementation(lambda count: peer.sorter(coords[:count], bits), check, whole)


def _packages(make: Callable[[Peer], OrderImplementation]) -> Implementations:
    return {peer.name: make(peer) for peer in present()}


def is_cube(shape: Sequence[int]) -> bool:
    """Whether all sides are the same power of two."""
    return len(set(shape)) == 1 and shape[0].bit_count() == 1


def bits_of(shape: Sequence[int]) -> int:
    """Bits that the largest coordinate takes."""
    return max(1, (max(shape) - 1).bit_length())
