"""Permutations of grids along curves, by name: the C function of each curve, and the default tile."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np

from dilkit.orders.checks import Index, empty
from dilkit.orders.compiled import _curves

TILE_SIDE = {1: 64, 2: 8, 3: 4}
"""The side of a tile of 64 cells, by the number of axes."""


def curve_permutation(
    shape: tuple[int, ...], curve: str, tile: tuple[int, ...] | None, extra_tokens: int, is_transposed: bool = False
) -> Index:
    """Return the row-major index at each place of a curve through a grid, `(extra_tokens + cells,)`; its axes may be reversed."""
    perm = empty(extra_tokens + prod(shape))
    perm[:extra_tokens] = np.arange(extra_tokens)
    cells = perm[extra_tokens:]
    if is_transposed:
        flipped = curve_permutation(shape[::-1], curve, None if tile is None else tile[::-1], 0)
        cells[:] = np.ravel_multi_index(np.unravel_index(flipped, shape[::-1])[::-1], shape)
    elif len(shape) == 1 or curve in ("row-major", "snake") or len(cells) == 1:
        _curves.row_major(cells)
        if curve == "snake" and len(shape) > 1:
            planes, rows = cells.reshape(-1, *shape[-2:]), cells.reshape(-1, shape[-1])
            planes[1::2] = planes[1::2, ::-1].copy()
            rows[1::2] = rows[1::2, ::-1].copy()
    elif tile is not None:
        _curves.tiles(cells, shape, tile)
    elif curve == "morton":
        _curves.morton(cells, shape)
    elif is_power_of_two_cube(shape):
        _curves.hilbert(cells, len(shape), shape[0].bit_length() - 1)
    else:
        _curves.generalised_hilbert(cells, shape)
    if extra_tokens:
        cells += extra_tokens
    return perm


def inverse(perm: Index) -> Index:
    """Return `rank` with `rank[perm[d]] = d`."""
    rank = empty(len(perm))
    _curves.invert(perm, rank)
    return rank


def is_power_of_two_cube(shape: tuple[int, ...]) -> bool:
    return len(set(shape)) == 1 and shape[0].bit_count() == 1


@lru_cache(maxsize=256)
def chosen_tile(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the default tile: about 64 cells, as near to a square or a cube as a tile can be that fills the grid.

    A side is the divisor of the grid's that is nearest to 8 (in 3-D to 4) by ratio, within a factor of 2; where there is none, 8
    or 4.
    """
    side = TILE_SIDE[len(shape)]
    divisors = [[n for n in range(side // 2, 2 * side + 1) if size % n == 0] for size in shape]
    nearest = (min(some, key=lambda n: (max(n, side) / min(n, side), -n), default=side) for some in divisors)
    return tuple(size if size <= side else tile for size, tile in zip(shape, nearest, strict=True))
