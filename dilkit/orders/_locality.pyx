# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The loops of dilkit.orders.locality over the cells of segments and of blocks. They hold no lock while they run.

Cells are `(n, 3)`, group after group; cells `starts[g]` to `starts[g + 1]` are those of group g.
"""

import numpy as np

from libc.math cimport sqrt
from libc.stdint cimport INT64_MAX, int64_t

cdef int64_t FAR = INT64_MAX


def nearest_kept(
    const int64_t[:, ::1] cells,
    const int64_t[::1] starts,
    const int64_t[::1] places,
    const int64_t[:, ::1] lows,
    const int64_t[:, ::1] sizes,
    int64_t rate,
    int64_t offset,
):
    """`(sum, largest, tokens)` over the distances from each cell to the nearest one that its segment keeps, in cells.

    Kept are the places `p` of a segment with `p % rate == offset`; its cells have the places from `places[s]` on. Segments that
    keep nothing are left out: `tokens` counts the cells of the others. `lows` and `sizes`, `(segments, 3)`: their bounding boxes.
    The exact distance transform of each box, axis by axis, in whole numbers: `d[x] = min_y d[y] + (x - y)^2`.
    """
    cdef int64_t[::1] box = np.empty(np.prod(sizes, 1).max(), np.int64), scratch = np.empty(3 * np.max(sizes), np.int64)
    cdef int64_t tokens = 0, largest = 0, square, i, first
    cdef double total = 0.0
    cdef Py_ssize_t s
    cdef int axis
    with nogil:
        for s in range(starts.shape[0] - 1):
            first = starts[s] + (offset - places[s] % rate + rate) % rate
            if first >= starts[s + 1]:
                continue
            for i in range(sizes[s, 0] * sizes[s, 1] * sizes[s, 2]):
                box[i] = FAR
            for i in range((starts[s + 1] - first - 1) // rate + 1):
                box[_place(cells, first + i * rate, lows, sizes, s)] = 0
            for axis in range(3):
                _transform_axis(&box[0], sizes, s, axis, &scratch[0])
            for i in range(starts[s], starts[s + 1]):
                square = box[_place(cells, i, lows, sizes, s)]
                total += sqrt(<double>square)
                largest = max(largest, square)
            tokens += starts[s + 1] - starts[s]
    return total, sqrt(<double>largest), tokens


def active_blocks(
    const int64_t[:, ::1] cells,
    const int64_t[::1] starts,
    const int64_t[:, :, ::1] block_of,
    const int64_t[::1] reach,
    int64_t blocks,
):
    """Count the (query block, key block) pairs that hold cells at most `reach` apart along each axis.

    `block_of`, `(depth, rows, columns)`: the block of each cell, below `blocks`. The groups of `cells` are the query blocks.
    """
    cdef int64_t[::1] seen = np.full(blocks, -1, np.int64)
    cdef int64_t low[3]
    cdef int64_t high[3]
    cdef int64_t pairs = 0, i, z, y, x
    cdef Py_ssize_t g
    with nogil:
        for g in range(starts.shape[0] - 1):
            for i in range(starts[g], starts[g + 1]):
                _new_part(cells, i, i > starts[g], block_of.shape, reach, low, high)
                for z in range(low[0], high[0]):
                    for y in range(low[1], high[1]):
                        for x in range(low[2], high[2]):
                            if seen[block_of[z, y, x]] != g:
                                seen[block_of[z, y, x]] = g
                                pairs += 1
    return pairs


cdef inline void _new_part(
    const int64_t[:, ::1] cells,
    int64_t i,
    bint after_another,
    const Py_ssize_t *space,
    const int64_t[::1] reach,
    int64_t *low,
    int64_t *high,
) noexcept nogil:
    """The window of cell i; after a cell that it differs from along one axis alone, only what that cell's window did not hold."""
    cdef int axis, moved = -1, moves = 0
    for axis in range(3):
        low[axis] = max(0, cells[i, axis] - reach[axis])
        high[axis] = min(space[axis], cells[i, axis] + reach[axis] + 1)
        if after_another and cells[i, axis] != cells[i - 1, axis]:
            moved = axis
            moves += 1
    if moves == 1:
        if cells[i, moved] > cells[i - 1, moved]:
            low[moved] = max(low[moved], cells[i - 1, moved] + reach[moved] + 1)
        else:
            high[moved] = min(high[moved], cells[i - 1, moved] - reach[moved])


cdef inline int64_t _place(
    const int64_t[:, ::1] cells, int64_t i, const int64_t[:, ::1] lows, const int64_t[:, ::1] sizes, Py_ssize_t s
) noexcept nogil:
    """Return the place of cell i in the box of segment s."""
    return ((cells[i, 0] - lows[s, 0]) * sizes[s, 1] + cells[i, 1] - lows[s, 1]) * sizes[s, 2] + cells[i, 2] - lows[s, 2]


cdef void _transform_axis(int64_t *box, const int64_t[:, ::1] sizes, Py_ssize_t s, int axis, int64_t *scratch) noexcept nogil:
    """Transform every line of the box along `axis`."""
    cdef int64_t length = sizes[s, axis], stride = 1, lines = 1, outer, inner
    cdef int a
    for a in range(3):
        if a < axis:
            lines *= sizes[s, a]
        if a > axis:
            stride *= sizes[s, a]
    if length > 1:
        for outer in range(lines):
            for inner in range(stride):
                _transform(box + outer * length * stride + inner, length, stride, scratch)


cdef void _transform(int64_t *line, int64_t length, int64_t stride, int64_t *scratch) noexcept nogil:
    """`d[x] = min_y d[y] + (x - y)^2` for one line, from the lower envelope of its parabolas, in linear time.

    `tops[i]` is the lowest parabola from `begins[i]` until `begins[i + 1]`.
    """
    cdef int64_t *before = scratch
    cdef int64_t *tops = scratch + length
    cdef int64_t *begins = scratch + 2 * length
    cdef int64_t count = 0, x, begin, i = 0
    for x in range(length):
        before[x] = line[x * stride]
        if before[x] == FAR:
            continue
        begin = 0
        while count:
            begin = _overtakes(tops[count - 1], x, before)
            if begin > begins[count - 1]:
                break
            begin = 0
            count -= 1
        if begin < length:
            tops[count] = x
            begins[count] = begin
            count += 1
    if count:
        for x in range(length):
            while i + 1 < count and begins[i + 1] <= x:
                i += 1
            line[x * stride] = before[tops[i]] + (x - tops[i]) * (x - tops[i])


cdef inline int64_t _overtakes(int64_t old, int64_t new, const int64_t *before) noexcept nogil:
    """The first x, 0 or more, at which the parabola of `new` is no higher than that of `old`, which is on its left."""
    cdef int64_t rise = before[new] + new * new - before[old] - old * old
    return (rise - 1) // (2 * (new - old)) + 1 if rise > 0 else 0
