# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Token orders of grids: Hilbert, Morton, tiles. The C code is in c/curves.

Each function writes into an array that the caller allocates, of int32 or int64, one element for each cell, and holds no lock while it does.
`shape` is one to three sides of at least 1, in row-major order. ValueError: sizes that do not fit each other.
"""

from math import prod

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t

from dilkit.orders.state_tables import BLOCK_BITS, block_tables

ctypedef fused integer:
    int32_t
    int64_t

cdef extern from "curves.h" nogil:
    ctypedef struct HilbertTables:
        int ndim, bits, states
        const uint16_t *cell
        const uint8_t *inner
        const uint8_t *before

    void curves_hilbert(void *out, int bytes, const HilbertTables *tables, int bits)
    void curves_generalised_hilbert(void *out, int bytes, const int64_t *shape)


def hilbert(integer[::1] out, int ndim, int bits):
    """Write `out[d]` = row-major index of the d-th cell of Hilbert's curve through a square or cube of sides `2**bits`.

    The curve is that of J. Skilling, "Programming the Hilbert curve" (2004): the cell's coordinates are what his transform makes of d.
    """
    if ndim not in (2, 3) or not 0 <= bits <= 31:
        raise ValueError(f"ndim={ndim} must be 2 or 3, and bits={bits} from 0 to 31")
    _check_cells(out.shape[0], sizeof(integer), (1 << bits,) * ndim)
    cdef const uint16_t[:, ::1] cell
    cdef const uint8_t[:, ::1] inner
    cdef const uint8_t[::1] before
    cdef HilbertTables tables
    cell, inner, before = block_tables(ndim)
    tables.ndim, tables.bits, tables.states = ndim, BLOCK_BITS[ndim], before.shape[0]
    tables.cell, tables.inner, tables.before = &cell[0, 0], &inner[0, 0], &before[0]
    with nogil:
        curves_hilbert(&out[0], sizeof(integer), &tables, bits)


def generalised_hilbert(integer[::1] out, shape):
    """Write the row-major indices of the cells of a box along a curve that starts at cell 0 and steps to a neighbour each time."""
    cdef int64_t sides[3]
    _fill(sides, _check_cells(out.shape[0], sizeof(integer), shape))
    with nogil:
        curves_generalised_hilbert(&out[0], sizeof(integer), sides)


def morton(integer[::1] out, shape):
    """Write the row-major indices of the cells of a box by ascending Morton code.

    The code takes the axes' bits in turn from the highest on, that of the first axis before those of the others.
    """
    cdef int64_t sides[3]
    cdef int64_t side = 1
    _fill(sides, _check_cells(out.shape[0], sizeof(integer), shape))
    while side < max(shape):
        side *= 2
    with nogil:
        _write_cube(&out[0], 0, sides, 0, 0, 0, side)


cdef int64_t _write_cube(
    integer *out, int64_t place, const int64_t *sides, int64_t z, int64_t y, int64_t x, int64_t side
) noexcept nogil:
    """Write the cells of the box in the cube of `side` cells at (z, y, x), from `out[place]` on. Return where they end."""
    cdef int64_t half = side // 2, part
    if z >= sides[0] or y >= sides[1] or x >= sides[2]:
        return place
    if side == 1:
        out[place] = <integer>((z * sides[1] + y) * sides[2] + x)
        return place + 1
    for part in range(4 if sides[0] == 1 else 8):
        place = _write_cube(out, place, sides, z + (part >> 2) * half, y + (part >> 1 & 1) * half, x + (part & 1) * half, half)
    return place


def tiles(integer[::1] out, shape, tile):
    """Write the row-major indices of the cells of a box tile by tile: tiles row-major, and the cells of each row-major.

    `tile` has a side of at least 1 for each axis; the tiles at the far sides are what is left of the box.
    """
    cdef int64_t sides[3]
    cdef int64_t step[3]
    cdef int64_t a, b, c, z, y, x, place = 0
    _fill(sides, _check_cells(out.shape[0], sizeof(integer), shape))
    if len(tile) != len(shape) or min(tile) < 1:
        raise ValueError(f"tile={tile!r} must be a side of at least 1 for each axis of shape={shape!r}")
    _fill(step, [min(pair) for pair in zip(tile, shape)])
    with nogil:
        for a in range((sides[0] - 1) // step[0] + 1):
            for b in range((sides[1] - 1) // step[1] + 1):
                for c in range((sides[2] - 1) // step[2] + 1):
                    for z in range(a * step[0], min((a + 1) * step[0], sides[0])):
                        for y in range(b * step[1], min((b + 1) * step[1], sides[1])):
                            for x in range(c * step[2], min((c + 1) * step[2], sides[2])):
                                out[place] = <integer>((z * sides[1] + y) * sides[2] + x)
                                place += 1


def invert(const integer[::1] perm, integer[::1] out):
    """Write `out[perm[i]] = i`. ValueError for an element of `perm` that is no index of it."""
    cdef Py_ssize_t i, count = perm.shape[0], wrong = -1
    if out.shape[0] != count:
        raise ValueError(f"out has {out.shape[0]} elements, must have as many as perm, {count}")
    with nogil:
        for i in range(count):
            if perm[i] < 0 or perm[i] >= count:
                wrong = i
                break
            out[perm[i]] = <integer>i
    if wrong >= 0:
        raise ValueError(f"perm[{wrong}]={perm[wrong]} must be at least 0 and below {count}")


def row_major(integer[::1] out):
    """Write `out[i] = i`: the simplest loop that stores, as a baseline for measuring the others."""
    cdef Py_ssize_t i
    with nogil:
        for i in range(out.shape[0]):
            out[i] = <integer>i


cdef _check_cells(Py_ssize_t length, int bytes, shape):
    """Return `shape`. Raises ValueError unless it has as many cells as `out` has elements, and these can hold their indices."""
    if not 1 <= len(shape) <= 3 or min(shape) < 1:
        raise ValueError(f"shape={shape!r} must be one to three sides of at least 1")
    cells = prod(shape)
    if length != cells:
        raise ValueError(f"out has {length} elements, must have one for each of the {cells} cells of shape={shape!r}")
    if bytes == 4 and cells > 1 << 31:
        raise ValueError(f"out is of int32, which cannot hold the {cells} cells of shape={shape!r}; int64 can")
    return shape


cdef _fill(int64_t *sides, values):
    """Three sides: 1 for the first ones where there are fewer values."""
    for i, side in enumerate((1,) * (3 - len(values)) + tuple(values)):
        sides[i] = side
