# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The tiles of `dilkit.backends.tiles.schedule`, in three loops: cells, residue classes of a cell, tiles of a class.

    cell             rows between two ends of segments, so that each branch has one segment there
    residue class    first, first + step, first + 2 step, ... within the cell: the same branches keep all of them
    tile             up to `tile_rows` consecutive rows of the class
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint32_t


def tiles(
    const int32_t[:, ::1] branches,
    const int32_t[:, ::1] offsets,
    const int32_t[::1] heads,
    int heads_at_once,
    int heads_per_kv_head,
    int64_t seq,
    int64_t step,
    int64_t tile_rows,
    bint every_row,
):
    """`(tiles, keys)`: int32 `(count, 4)` of row, set, head, rows; and int64 `(count,)`, about how many keys each tile scores.

    `branches`: int32 `(branches, 4)` of segment, rate and range of query heads; `offsets`: int32 `(branches, kv_heads)`.
    A tile is for the `heads_at_once` query heads from `heads[i]` on: its head is `heads[i]`, and its set holds the branches that
    serve any of them. With `every_row`, rows that no branch keeps are in tiles too, with an empty set.
    """
    cdef int64_t count = _list_tiles(
        branches, offsets, heads, heads_at_once, heads_per_kv_head, seq, step, tile_rows, every_row, None, None
    )
    found, keys = np.empty((count, 4), np.int32), np.empty(count, np.int64)
    _list_tiles(branches, offsets, heads, heads_at_once, heads_per_kv_head, seq, step, tile_rows, every_row, found, keys)
    return found, keys


cdef int64_t _list_tiles(
    const int32_t[:, ::1] branches,
    const int32_t[:, ::1] offsets,
    const int32_t[::1] heads,
    int heads_at_once,
    int heads_per_kv_head,
    int64_t seq,
    int64_t step,
    int64_t tile_rows,
    bint every_row,
    int32_t[:, ::1] tiles,
    int64_t[::1] keys,
):
    """The number of tiles; they are written to `tiles` and `keys` unless these are None."""
    cdef int64_t count = 0, start, stop, first, row, last
    cdef Py_ssize_t h
    cdef uint32_t chosen
    cdef bint write = tiles is not None
    with nogil:
        for h in range(heads.shape[0]):
            start = 0
            while start < seq:
                stop = _cell_end(branches, start, seq)
                for first in range(start, min(start + step, stop)):
                    chosen = _branch_set(branches, offsets, heads[h], heads_at_once, heads_per_kv_head, first)
                    if not chosen and not every_row:
                        continue
                    row = first
                    while row < stop:
                        last = min(tile_rows, (stop - row - 1) // step + 1)
                        if write:
                            tiles[count, 0] = <int32_t>row
                            tiles[count, 1] = <int32_t>chosen
                            tiles[count, 2] = heads[h]
                            tiles[count, 3] = <int32_t>last
                            keys[count] = _key_count(branches, chosen, row, seq)
                        count += 1
                        row += last * step
                start = stop
    return count


cdef inline int64_t _cell_end(const int32_t[:, ::1] branches, int64_t start, int64_t seq) noexcept nogil:
    """The end of the cell that begins at `start`: where the first of its segments ends."""
    cdef int64_t end = seq
    cdef Py_ssize_t b
    for b in range(branches.shape[0]):
        end = min(end, (start // branches[b, 0] + 1) * branches[b, 0])
    return end


cdef inline uint32_t _branch_set(
    const int32_t[:, ::1] branches,
    const int32_t[:, ::1] offsets,
    int first_head,
    int heads,
    int heads_per_kv_head,
    int64_t row,
) noexcept nogil:
    """The branches that keep `row`, of those that serve one of the heads."""
    cdef uint32_t chosen = 0
    cdef Py_ssize_t b
    for b in range(branches.shape[0]):
        if first_head < branches[b, 3] and branches[b, 2] < first_head + heads:
            if row % branches[b, 0] % branches[b, 1] == offsets[b, first_head // heads_per_kv_head]:
                chosen |= (<uint32_t>1) << b
    return chosen


cdef inline int64_t _key_count(const int32_t[:, ::1] branches, uint32_t chosen, int64_t row, int64_t seq) noexcept nogil:
    """About how many keys the rows of a tile see; a key of several branches counts for each."""
    cdef int64_t total = 0, start
    cdef Py_ssize_t b
    for b in range(branches.shape[0]):
        if chosen >> b & 1:
            start = row // branches[b, 0] * branches[b, 0]
            total += (min(start + branches[b, 0], seq) - start) // branches[b, 1]
    return total
