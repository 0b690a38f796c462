"""Hilbert's curve by the transform of J. Skilling, "Programming the Hilbert curve", AIP Conf. Proc. 707, 2004: short and slow."""

from __future__ import annotations


def cell_of(index: int, ndim: int, bits: int) -> tuple[int, ...]:
    """The coordinates of a point of the curve through a cube of `2**bits` cells along each of `ndim` axes.

    The index's bits are dealt to the axes in turn, the highest to the first axis. The words are then a reflected binary code of
    the cell. That code is undone, and then, from the finest level to the coarsest, what the curve does within a level's parts: it
    swaps the first axis with another one, or turns it round.
    """
    x = [0] * ndim
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
            if x[axis] >> level & 1:
                x[0] ^= finer
            else:
                differing = (x[0] ^ x[axis]) & finer
                x[0], x[axis] = x[0] ^ differing, x[axis] ^ differing
    return tuple(x)


def permutation(ndim: int, bits: int) -> list[int]:
    """The row-major indices of the cells along the curve, its first coordinate that of the first axis."""
    cells = (cell_of(index, ndim, bits) for index in range(1 << ndim * bits))
    return [sum(c << bits * (ndim - 1 - axis) for axis, c in enumerate(cell)) for cell in cells]
