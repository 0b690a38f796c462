"""Hilbert's curve by the transform of J. Skilling, "Programming the Hilbert curve", AIP Conf. Proc. 707, 2004: short and slow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def coordinates(index: NDArray[np.int64], ndim: int, bits: int) -> list[NDArray[np.int64]]:
    """The coordinates of points of the curve through a cube of `2**bits` cells along each of `ndim` axes.

    The index's bits are dealt to the axes in turn, the highest to the first axis. The words are then a reflected binary code of
    the cell. That code is undone, and then, from the finest level to the coarsest, what the curve does within a level's parts: it
    turns the first axis round where a coordinate has a one, and swaps the first axis with that coordinate's where it has a zero.
    """
    x = [np.zeros_like(index) for _ in range(ndim)]
    for position in range(ndim * bits):
        bit = index >> (ndim * bits - 1 - position) & 1
        x[position % ndim] |= bit << (bits - 1 - position // ndim)
    carried = x[-1] >> 1
    for axis in range(ndim - 1, 0, -1):
        x[axis] ^= x[axis - 1]
    x[0] ^= carried
    for level in range(1, bits):
        finer = (1 << level) - 1
        for axis in reversed(range(ndim)):
            turned = (x[axis] >> level & 1) * finer
            x[0] ^= turned
            swapped = (x[0] ^ x[axis]) & (finer ^ turned)
            x[0] ^= swapped
            if axis:
                x[axis] ^= swapped
    return x


def permutation(ndim: int, bits: int) -> NDArray[np.int64]:
    """The row-major indices of the cells along the curve, its first coordinate that of the first axis."""
    x = coordinates(np.arange(1 << ndim * bits), ndim, bits)
    return np.array(sum(c << bits * (ndim - 1 - axis) for axis, c in enumerate(x)))
