"""Tiles: device functions that load, multiply and store them, for the forward and the gradients alike.

    score tile      scores[row, column] = rows[row] . columns[column]       `dot_products`, `score_tile`
    accumulator     sums[row] += sum over columns of weights[row, column] * columns[column]      `accumulate`

The rows are those of the schedule's tile; they stay in shared memory. The columns are what they see; they stream through it.
A tile in shared memory is an array `(rows, quads, 4)`: rows of numbers in quads of four, which a thread reads with one
instruction. Each row has a quad more than it needs, so that threads reading neighbouring rows use different banks. A thread of
a block of `down x across` threads has the rows `y, y + down, ...` of a product and the columns, or the quads of columns,
`x, x + across, ...`. Loops over sizes that are known when a kernel is compiled are unrolled, and local arrays become registers.
The loops in which the time goes are `while` loops: a `range` counts in two numbers, which the compiler does not see through.
"""

from __future__ import annotations

from collections import namedtuple

from numpy import float32, uint64

from dilkit.backends.numba.compiling import LOG2E, NEG_INF, ZERO, device

HeadRows = namedtuple("HeadRows", "numbers first stride head_dim")
"""The rows of one head of a tensor: its numbers, where the row at position 0 begins, the stride and length of rows."""


@device
def rows_of(view, tile, head, problem):
    """Return the rows of one head of a tensor, at the tile's place in the batch."""
    return HeadRows(view.numbers, tile.batch * view.batch + head * view.head, view.row, problem.head_dim)


@device
def load(tile, source, positions, start, thread):
    """tile[r] = source[positions[start + r]], zeros where there is no such row or column."""
    for i in range(tile.shape[0] // thread.down):
        r = thread.y + i * thread.down
        position = positions[start + r]
        place = source.first + max(position, 0) * source.stride
        present = source.head_dim if position >= 0 else 0
        for j in range((tile.shape[1] - 1) * 4 // thread.across):
            c = thread.x + j * thread.across
            number = float32(source.numbers[uint64(place + min(c, source.head_dim - 1))])
            tile[r, c // 4, c % 4] = number if c < present else ZERO


@device
def dot_products(products, rows, columns, thread):
    """products[i, j] = rows[r] . columns[c]: r = y + i * down, c = x + j * across."""
    fill(products, ZERO)
    d = 0
    while d < rows.shape[1] - 1:
        for i in range(products.shape[0]):
            r = thread.y + i * thread.down
            for j in range(products.shape[1]):
                c = thread.x + j * thread.across
                for u in range(4):
                    products[i, j] += rows[r, d, u] * columns[c, d, u]
        d += 1


@device
def fill(numbers, number):
    """Fill `numbers`, of two dimensions, with `number`."""
    for i in range(numbers.shape[0]):
        for j in range(numbers.shape[1]):
            numbers[i, j] = number


@device
def score_tile(scores, rows, memory, start, scale, biases, limits, rows_are_keys, thread):
    """scores = scale * log2(e) * rows . stream + bias of the column + bias of the row; NEG_INF where a query may not see a key.

    The stream holds the columns from number `start` of the window on. `limits`: the last position that a query sees, or the
    first that sees a key.
    """
    dot_products(scores, rows, memory.stream, thread)
    scale2 = scale * LOG2E
    for i in range(scores.shape[0]):
        for j in range(scores.shape[1]):
            c = start + thread.x + j * thread.across
            position, limit = memory.positions[c], limits[i]
            hidden = position < limit if rows_are_keys else position > limit
            scores[i, j] = NEG_INF if hidden else scores[i, j] * scale2 + (memory.biases[c] + biases[i])


@device
def place(tile, numbers, thread):
    """tile[r, c] = numbers[i, j]: r = y + i * down, c = x + j * across."""
    for i in range(numbers.shape[0]):
        for j in range(numbers.shape[1]):
            c = thread.x + j * thread.across
            tile[thread.y + i * thread.down, c // 4, c % 4] = numbers[i, j]


@device
def accumulate(sums, weights, columns, thread):
    """sums[i] += sum over k of weights[r, k] * columns[k], in the thread's quads of columns: r = y + i * down.

    The innermost products are written out: a loop more, and the compiler does not unroll those of a head_dim of 96.
    """
    k = 0
    while k < weights.shape[1] - 1:
        for i in range(sums.shape[0]):
            r = thread.y + i * thread.down
            w0, w1, w2, w3 = weights[r, k, 0], weights[r, k, 1], weights[r, k, 2], weights[r, k, 3]
            for q in range(sums.shape[1] // 4):
                c = thread.x + q * thread.across
                for u in range(4):
                    total = sums[i, q * 4 + u]
                    total += w0 * columns[k * 4, c, u]
                    total += w1 * columns[k * 4 + 1, c, u]
                    total += w2 * columns[k * 4 + 2, c, u]
                    total += w3 * columns[k * 4 + 3, c, u]
                    sums[i, q * 4 + u] = total
        k += 1


@device
def sum_column(thread, j):
    """Return the accumulator's column that is number `j` of a thread; the thread's quads are `across` apart."""
    return (thread.x + j // 4 * thread.across) * 4 + j % 4


@device
def store(target, sums, factor, add, positions, thread):
    """target[positions[r]] = factor * sums, or += if `add`: the rows and columns of a thread that are there."""
    for i in range(sums.shape[0]):
        position = positions[thread.y + i * thread.down]
        place = target.first + max(position, 0) * target.stride
        for j in range(sums.shape[1]):
            c = sum_column(thread, j)
            if position >= 0 and c < target.head_dim:
                number = factor * sums[i, j]
                if add:
                    number += float32(target.numbers[uint64(place + c)])
                target.numbers[uint64(place + c)] = number
