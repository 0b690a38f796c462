"""Who takes part in each row of the suite of token orders, on which inputs, and what is checked of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from dilkit.tools.bench.orders import checks as order_checks
from dilkit.tools.bench.orders import peers as order_peers
from dilkit.tools.bench.orders.checks import Finding, same
from dilkit.tools.bench.orders.contest import Candidate
from dilkit.tools.bench.orders.engine import Dilkit, Interleaved, store_loop
from dilkit.tools.bench.orders.peers import Array, Peer, Task

Candidates = dict[str, Candidate]
STORE_LOOP, ARGSORT = "store loop", "np.argsort"


def permutation(shape: Sequence[int], dtype: str) -> Candidates:
    """The whole curve through a grid, beside a store loop into the same array; packages in int32 alone."""
    out = np.zeros(prod(shape), dtype)
    found = _cube(shape, out) if is_cube(shape) else _generalised(tuple(shape), out)
    loop = Candidate(lambda _: store_loop(out), lambda n, x: same("out[i] is i", x, np.arange(n)))
    return found | {STORE_LOOP: loop}


def _cube(shape: Sequence[int], out: Array) -> Candidates:
    ndim, bits, dtype, ours = len(shape), bits_of(shape), str(out.dtype), Dilkit()

    def check(count: int, cells: Array) -> list[Finding]:
        decoded = ours.decoder(np.arange(count, dtype=np.uint32), ndim, bits).result()
        equal = same("equal to decode of 0, 1, 2, ...", cells, order_peers.row_major(decoded.T, bits, dtype))
        return order_checks.walk(cells, shape) + equal

    def other(peer: Peer) -> Candidate:
        def check(_: int, cells: Array) -> list[Finding]:
            return order_checks.curve(peer, ndim, bits) + order_checks.walk(cells, shape)

        return Candidate(lambda count: peer.walker(ndim, bits, count, dtype), check, whole=False)

    found = {ours.name: Candidate(lambda count: ours.walker(ndim, bits, count, dtype, out), check)}
    return found | _others(other if dtype == "int32" else None)


def _generalised(shape: tuple[int, ...], out: Array) -> Candidates:
    """Packages have codes on cubes of a power of two alone: sorted codes are what they offer here, a curve with jumps."""
    ours = Dilkit()
    found = {ours.name: Candidate(lambda _: ours.rambler(shape, out), lambda _, cells: order_checks.walk(cells, shape))}
    coords = coordinates(np.arange(len(out)), shape)
    return found | _others((lambda peer: _sorter(peer, coords, bits_of(shape))) if out.dtype == np.int32 else None)


def rank(shape: Sequence[int]) -> Candidates:
    """The position on the curve of each cell of a cube, the cells in row-major order; and the inverse of the permutation."""
    ndim, bits, ours = len(shape), bits_of(shape), Dilkit()
    perm = ours.walker(ndim, bits, prod(shape), "int32").result()

    def ranker(peer: Peer, whole: bool = False) -> Candidate:
        def check(count: int, codes: Array) -> list[Finding]:
            cells = order_peers.row_major(peer.decoder(codes, ndim, bits).result().T, bits, "int32")
            return order_checks.curve(peer, ndim, bits) + same("decode gives the cells back", cells, np.arange(count))

        return Candidate(lambda count: peer.ranker(ndim, bits, count), check, whole)

    inverse = Candidate(
        lambda _: ours.inverter(perm), lambda count, ranks: same("rank[perm] is 0, 1, 2, ...", ranks[perm], np.arange(count))
    )
    return {ours.name: ranker(ours, whole=True), "dilkit, inverted": inverse} | _others(ranker)


def encode(coords: Array, bits: int) -> Candidates:
    """Codes of points."""

    def encoder(peer: Peer, whole: bool = False) -> Candidate:
        def check(count: int, codes: Array) -> list[Finding]:
            back = peer.decoder(codes, coords.shape[1], bits).result()
            return order_checks.curve(peer, coords.shape[1], bits) + same("decode gives the points back", back, coords[:count])

        return Candidate(lambda count: peer.encoder(coords[:count], bits), check, whole)

    return {ours.name: encoder(ours, whole=True) for ours in (Dilkit(), Interleaved())} | _others(encoder)


def decode(codes: Array, ndim: int, bits: int) -> Candidates:
    """Points of codes."""

    def decoder(peer: Peer, whole: bool = False) -> Candidate:
        def check(count: int, cells: Array) -> list[Finding]:
            back = peer.encoder(cells.astype(np.uint16), bits).result()
            return order_checks.curve(peer, ndim, bits) + same("encode gives the codes back", back, codes[:count])

        return Candidate(lambda count: peer.decoder(codes[:count], ndim, bits), check, whole)

    return {ours.name: decoder(ours, whole=True) for ours in (Dilkit(), Interleaved())} | _others(decoder)


def sort(coords: Array, bits: int) -> Candidates:
    """The order of points along the curve; beside it, NumPy's stable sort of dilkit's codes."""
    coords = coords - coords.min(0)  # which sort_points does for itself
    bits, ours = max(1, int(coords.max()).bit_length()), Dilkit()

    def argsort(count: int) -> Task:
        return Peer.sorter(ours, coords[:count], bits)

    found = {ours.name: _sorter(ours, coords, bits, whole=True)}
    return found | {ARGSORT: Candidate(argsort, _sorter(ours, coords, bits).check)} | _others(lambda p: _sorter(p, coords, bits))


def _sorter(peer: Peer, coords: Array, bits: int, whole: bool = False) -> Candidate:
    def check(count: int, permutation: Array) -> list[Finding]:
        codes = peer.encoder(coords[:count], bits).result()
        return order_checks.curve(peer, coords.shape[1], bits) + order_checks.sorting(permutation, codes)

    return Candidate(lambda count: peer.sorter(coords[:count], bits), check, whole)


def _others(make: Callable[[Peer], Candidate] | None) -> Candidates:
    return {peer.name: make(peer) for peer in order_peers.present()} if make else {}


def is_cube(shape: Sequence[int]) -> bool:
    """Whether all sides are the same power of two."""
    return len(set(shape)) == 1 and shape[0].bit_count() == 1


def bits_of(shape: Sequence[int]) -> int:
    """Bits that the largest coordinate takes."""
    return max(1, (max(shape) - 1).bit_length())


def coordinates(cells: Array, shape: Sequence[int]) -> Any:
    """The coordinates of cells given by their row-major indices."""
    return np.stack(np.unravel_index(cells, tuple(shape)), 1).astype(np.uint16)
