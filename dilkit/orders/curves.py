"""Permutations of grids along curves, by name: the C function of each curve, and the default tile."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np

from dilkit.orders.checks import Index, empty
from dilkit.orders.compiled import _curves, _generalised_hilbert

TILE_SIDE = {1: 64, 2: 8, 3: 4}
"""The side of a tile of 64 cells, by the number of axes."""


def curve_permutation(shape: tuple[int, ...], curve: str, tile: tuple[int, ...] | None, extra_tokens: int, threads: int) -> Index:
    """Return the row-major index at each place of a curve through a grid, behind the extra tokens: `(extra_tokens + cells,)`."""
    perm = empty(extra_tokens + prod(shape))
    perm[:extra_tokens] = np.arange(extra_tokens)
    cells = perm[extra_tokens:]
    if len(shape) == 1 or curve == "row-major" or prod(shape) == 1:
        cells[:] = np.arange(len(cells), dtype=perm.dtype)
    elif tile is not None:
        _curves.tiles(cells, shape, tile)
    elif curve == "snake":
        _curves.snake(cells, shape)
    elif curve == "morton":
        _curves.morton(cells, shape, threads)
    elif is_power_of_two_cube(shape):
        _curves.hilbert(cells, len(shape), shape[0].bit_length() - 1, threads)
    else:
        _generalised_hilbert.generalised_hilbert(cells, shape, threads)
    if extra_tokens:
        cells += extra_tokens
    return perm


def transposed_curve_permutation(
    shape: tuple[int, ...], curve: str, tile: tuple[int, ...] | None, extra_tokens: int, threads: int
) -> Index:
    """Return `curve_permutation` for the grid with its axes reversed, in row-major indices of the grid as it is."""
    flipped = curve_permutation(shape[::-1], curve, None if tile is None else tile[::-1], 0, threads)
    perm = empty(extra_tokens + len(flipped))
    perm[:extra_tokens] = np.arange(extra_tokens)
    perm[extra_tokens:] = np.ravel_multi_index(np.unravel_index(flipped, shape[::-1])[::-1], shape)
    perm[extra_tokens:] += extra_tokens
    return perm


def inverse(perm: Index) -> Index:
    """Return `rank` with `rank[perm[d]] = d`."""
    rank = empty(len(perm))
    _curves.invert(perm, rank)
    return rank


def hilbert_rank(shape: tuple[int, ...], extra_tokens: int) -> Index:
    """Compute the inverse permutation of the true Hilbert curve from the curve: faster than inverting the permutation."""
    rank = empty(extra_tokens + prod(shape))
    rank[:extra_tokens] = np.arange(extra_tokens)
    _curves.hilbert_rank(rank[extra_tokens:], len(shape), shape[0].bit_length() - 1, 1)
    if extra_tokens:
        rank[extra_tokens:] += extra_tokens
    return rank


def is_power_of_two_cube(shape: tuple[int, ...]) -> bool:
    """True if all sides are the same power of two."""
    return len(set(shape)) == 1 and shape[0].bit_count() == 1


@lru_cache(maxsize=256)
def chosen_tile(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the default tile: about 64 cells, as near to a square or a cube as a tile can be that fills the grid.

    A side is the divisor of the grid's that is nearest to 8 (in 3-D to 4) by ratio, within a factor of 2; where there is none,
    8 (or 4) itself, so that the last tiles are smaller.
    """
    side = TILE_SIDE[len(shape)]
    return tuple(_tile_side(size, side) for size in shape)


def _tile_side(size: int, side: int) -> int:
    if size <= side:
        return size
    fitting = [n for n in range(side // 2, 2 * side + 1) if size % n == 0]
    return min(fitting, key=lambda n: (max(n, side) / min(n, side), -n), default=side)
