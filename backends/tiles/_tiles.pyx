# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The tiles of `dilkit.backends.tiles.schedule`, in three loops: cells, residue classes of a cell, tiles of a class.

    cell             rows between two ends of segments, so that each branch has one segment there
    residue class    first, first + step, first + 2 step, ... within the cell: the same branches keep all of them
    tile             up to `tile_rows` consecutive rows of the class

A class has the first of `steps` that will do: the closer the rows of a tile, the fewer keys after a row a causal one scores.
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t


def tiles(
    const int32_t[:, ::1] branches,
    const int32_t[:, ::1] offsets,
    const int32_t[::1] heads,
    int heads_at_once,
    int heads_per_kv_head,
    int64_t seq,
    const int64_t[::1] steps,
    int64_t tile_rows,
    bint every_row,
):
    """`(tiles, keys)`: int32 `(count, 4)`, which are `TILE`s; and int64 `(count,)`, about how many keys each tile scores.

    `branches`: int32 `(branches, 4)` of segment, rate and range of query heads; `offsets`: int32 `(branches, kv_heads)`.
    `steps`: ascending from 1, each a multiple of the one before; the last is a multiple of all rates, or `seq`.
    A tile is for the `heads_at_once` query heads from `heads[i]` on: its head is `heads[i]`, and its set holds the branches that
    serve any of them. With `every_row`, rows that no branch keeps are in tiles too, with an empty set.
    """
    cdef int64_t count, start, stop, residues, first, step, row, rows, seen, most = min(seq, max(steps), np.min(np.asarray(branches)[:, 0]))
    cdef Py_ssize_t h, s
    # of each residue of a cell, the branches that keep it, and whether it is in a class
    cdef uint32_t[::1] sets = np.empty(most, np.uint32)
    cdef uint8_t[::1] listed = np.empty(most, np.uint8)
    cdef int32_t[:, ::1] tiles = None
    cdef int64_t[::1] keys = None
    for _ in range(2):  # they are counted before they are written
        count = 0
        with nogil:
            for h in range(heads.shape[0]):
                start = 0
                while start < seq:
                    stop = _cell_end(branches, start, seq)
                    residues = min(steps[steps.shape[0] - 1], stop - start)
                    for first in range(residues):
                        sets[first] = _branch_set(branches, offsets, heads[h], heads_at_once, heads_per_kv_head, start + first)
                        listed[first] = False
                    for s in range(steps.shape[0]):
                        step = steps[s]
                        for first in range(min(step, residues)):
                            if listed[first] or not _alike(sets[first:residues:step]):
                                continue
                            listed[first:residues:step] = True
                            row = start + first if sets[first] or every_row else stop
                            seen = _key_count(branches, sets[first], row, seq)
                            while row < stop:
                                rows = min(tile_rows, (stop - row - 1) // step + 1)
                                if tiles is not None:
                                    tiles[count, 0] = <int32_t>row
                                    tiles[count, 1] = <int32_t>sets[first]
                                    tiles[count, 2] = <int32_t>step
                                    tiles[count, 3] = <int32_t>(heads[h] | rows << 16)
                                    keys[count] = seen
                                count += 1
                                row += rows * step
                    start = stop
        if tiles is None:
            tiles, keys = np.empty((count, 4), np.int32), np.empty(count, np.int64)
    return np.asarray(tiles), np.asarray(keys)


cdef inline bint _alike(const uint32_t[:] sets) noexcept nogil:
    """True if all are equal."""
    cdef Py_ssize_t i
    for i in range(1, sets.shape[0]):
        if sets[i] != sets[0]:
            return False
    return True


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
