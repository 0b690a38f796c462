"""Whether curves are what they should be, checked just before they are timed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np

from dilkit.tools.bench.orders.peers import Array, Peer
from dilkit.tools.bench.orders.record import Finding

SMALL_BITS = {2: 4, 3: 3}
"""The grid that is visited as a whole, by its number of axes: 16 and 8 cells a side."""
STRETCH = 256
"""Cells that are visited in the middle of a larger curve."""


def curve(peer: Peer, ndim: int, bits: int) -> list[Finding]:
    """The codes of `peer` are positions on a Hilbert curve: a small grid as a whole, and a stretch of the curve of `bits`."""
    small = SMALL_BITS[ndim]
    codes = np.arange(1 << ndim * small)
    cells = np.stack(peer.decoder(codes, ndim, small).result())
    once = np.unique(cells, axis=1).shape == cells.shape and bool(cells.max() < 1 << small)
    middle, half = 1 << ndim * bits - 1, min(STRETCH, 1 << ndim * bits) // 2
    stretch = peer.decoder(np.arange(middle - half, middle + half), ndim, bits).result()
    return [
        Finding(f"the cells of 0, 1, 2, ... are each cell of a small {ndim}-D grid once", once),
        Finding("they are a step of one cell apart", _jumps(cells) == 0),
        same("their codes are 0, 1, 2, ...", peer.encoder(cells, small).result(), codes),
        Finding(f"cells in the middle of the curve of {bits} bits are a step of one cell apart", _jumps(stretch) == 0),
    ]


def visits(indices: Array, shape: Sequence[int]) -> list[Finding]:
    """Row-major `indices` are distinct cells of the grid, all of them if there are as many, by steps of one cell.

    Where a side is odd a curve may have to jump: then the number of jumps is only reported.
    """
    seen = np.zeros(prod(shape), bool)
    seen[indices] = True
    jumps = _jumps(np.unravel_index(indices, tuple(shape)))
    may_jump = any(side % 2 for side in shape)
    return [
        Finding(f"{len(indices):,} of {len(seen):,} cells are visited, each once", int(seen.sum()) == len(indices)),
        Finding(f"steps that are not of one cell: {jumps}", may_jump or jumps == 0),
    ]


def sorting(permutation: Array, codes: Array) -> list[Finding]:
    """`permutation` puts `codes` into ascending order."""
    once = np.array_equal(np.sort(permutation), np.arange(len(codes)))
    ascending = once and bool((np.diff(codes[permutation].astype(np.int64)) >= 0).all())
    return [Finding("each point occurs once", once), Finding("its codes ascend", ascending)]


def same(what: str, left: Array, right: Array) -> Finding:
    """Two results are the same."""
    return Finding(what, np.array_equal(left, right))


def _jumps(axes: Iterable[Array]) -> int:
    """How many cells do not follow the one before by a step of one cell."""
    lengths = sum(np.abs(np.diff(axis.astype(np.int32))) for axis in axes)
    return int(np.count_nonzero(lengths != 1))
