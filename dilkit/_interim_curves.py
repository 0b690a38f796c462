"""Interim: slow curves, until the Cython ones are merged. To be deleted."""

from __future__ import annotations

import numpy as np


def _sgn(x):
    return (x > 0) - (x < 0)


def _gilbert2d(x, y, ax, ay, bx, by):
    w, h = abs(ax + ay), abs(bx + by)
    dax, day, dbx, dby = _sgn(ax), _sgn(ay), _sgn(bx), _sgn(by)
    if h == 1:
        for _ in range(w):
            yield x, y
            x, y = x + dax, y + day
        return
    if w == 1:
        for _ in range(h):
            yield x, y
            x, y = x + dbx, y + dby
        return
    ax2, ay2, bx2, by2 = (int(v / 2) for v in (ax, ay, bx, by))
    w2, h2 = abs(ax2 + ay2), abs(bx2 + by2)
    if 2 * w > 3 * h:
        if w2 % 2 and w > 2:
            ax2, ay2 = ax2 + dax, ay2 + day
        yield from _gilbert2d(x, y, ax2, ay2, bx, by)
        yield from _gilbert2d(x + ax2, y + ay2, ax - ax2, ay - ay2, bx, by)
    else:
        if h2 % 2 and h > 2:
            bx2, by2 = bx2 + dbx, by2 + dby
        yield from _gilbert2d(x, y, bx2, by2, ax2, ay2)
        yield from _gilbert2d(x + bx2, y + by2, ax, ay, bx - bx2, by - by2)
        yield from _gilbert2d(x + (ax - dax) + (bx2 - dbx), y + (ay - day) + (by2 - dby), -bx2, -by2, -(ax - ax2), -(ay - ay2))


def hilbert(shape):
    if len(shape) == 2:
        h, w = shape
        cells = _gilbert2d(0, 0, w, 0, 0, h) if w >= h else _gilbert2d(0, 0, 0, h, w, 0)
        return np.array([y * w + x for x, y in cells])
    plane = _hilbert(shape[1:])
    return np.concatenate([i * len(plane) + (plane if i % 2 == 0 else plane[::-1]) for i in range(shape[0])])


def morton(shape):
    grid = np.indices(shape).reshape(len(shape), -1)
    code = sum(((grid[a] >> b) & 1) << (b * len(shape) + len(shape) - 1 - a) for a in range(len(shape)) for b in range(20))
    return np.argsort(code, kind="stable")


def tiles(shape, tile):
    grid = np.indices(shape).reshape(len(shape), -1)
    return np.lexsort([grid[a] for a in reversed(range(len(shape)))] + [grid[a] // tile[a] for a in reversed(range(len(shape)))])


def snake(shape):
    cells = np.arange(np.prod(shape)).reshape(shape)
    for axis in range(1, len(shape)):
        odd = np.indices(shape[:axis]).reshape(axis, -1)[-1] % 2 == 1
        flat = cells.reshape(-1, *shape[axis:])
        flat[odd] = flat[odd][:, ::-1]
    return cells.ravel()


# The signatures of the engines to come.
_hilbert, _morton, _tiles, _snake = hilbert, morton, tiles, snake


def hilbert(out, ndim, bits, threads):
    out[:] = _hilbert((1 << bits,) * ndim)


def generalised_hilbert(out, shape, threads):
    out[:] = _hilbert(shape)


def morton(out, shape, threads):
    out[:] = _morton(shape)


def tiles(out, shape, tile):
    out[:] = _tiles(shape, tile)


def snake(out, shape):
    out[:] = _snake(shape)


def invert(perm, out):
    out[perm] = np.arange(len(perm), dtype=perm.dtype)
