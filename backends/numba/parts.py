"""Device functions of the kernels in numba.cuda: which keys the rows of a tile see, and the two matrix products on tiles.

A tile in shared memory is an array `(rows, quads, 4)`: rows of numbers in quads of four, which a thread reads with one
instruction. Each row has a quad more than it needs, so that threads reading neighbouring rows use different banks. A thread of
a block of `down x across` threads has the rows `y, y + down, ...` of a product and the columns, or the quads of columns,
`x, x + across, ...`. Loops over sizes that are known when a kernel is compiled are unrolled, and local arrays become registers.
The loops in which the time goes are `while` loops: a `range` counts in two numbers, which the compiler does not see through.

Nothing here uses `cuda` inside a function: the kernels pass the numbers of their threads and do all synchronising.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config, cuda
from numpy import float32, uint64

SIMULATED: bool = config.ENABLE_CUDASIM
"""Whether kernels run in numba's simulator, on the CPU: decided by `NUMBA_ENABLE_CUDASIM` before numba is first imported."""

ALIGN = None if SIMULATED else 16
"""Bytes at multiples of which a tile starts; the simulator knows no alignment."""

if SIMULATED:
    exp2, log2 = np.exp2, np.log2
else:
    from numba.cuda import libdevice

    exp2, log2 = libdevice.exp2f, libdevice.log2f

NEVER = float32(-math.inf)
ZERO = float32(0.0)

Keys = namedtuple("Keys", "runs spans sizes")
"""The keys of a tile, in shared memory: `runs` (first, step, count, branch), `spans` (start, stop, rate) of the segments of the
tile's row, by branch; `sizes`: how many keys there are, and how many runs."""


def device(function: Callable[..., Any]) -> Any:
    """`function` as part of the kernels that call it; the simulator takes it as it is."""
    return function if SIMULATED else cuda.jit(device=True, forceinline=True)(function)


@device
def add_run(keys, row, branch, low, high):
    """Append the rows of `branch` from `low` on and below `high`, both inside its segment."""
    rate = keys.spans[branch, 2]
    first = low + (row - low) % rate
    if first < high:
        count, run = (high - first - 1) // rate + 1, keys.sizes[1]
        keys.runs[run, 0] = first
        keys.runs[run, 1] = rate
        keys.runs[run, 2] = count
        keys.runs[run, 3] = branch
        keys.sizes[0] += count
        keys.sizes[1] += 1


@device
def find_keys(keys, branches, chosen, row, seq, lowest, highest):
    """List the keys that `row` sees through the branches of the bit set `chosen`, from `lowest` on and below `highest`.

    A stretch of a segment that an earlier branch of a dividing rate covers is left out. One thread calls it.
    """
    keys.sizes[0] = 0
    keys.sizes[1] = 0
    for b in range(branches.shape[0]):
        if chosen >> b & 1:
            segment, rate = branches[b, 0], branches[b, 1]
            low = row // segment * segment
            high = min(low + segment, seq)
            keys.spans[b, 0] = low
            keys.spans[b, 1] = high
            keys.spans[b, 2] = rate
            covered_from, covered_to = high, high
            for j in range(b):
                if chosen >> j & 1 and rate % keys.spans[j, 2] == 0:
                    covered_from, covered_to = max(low, keys.spans[j, 0]), min(high, keys.spans[j, 1])
            add_run(keys, row, b, max(low, lowest), min(covered_from, highest))
            add_run(keys, row, b, max(covered_to, lowest), min(high, highest))


@device
def key_bias(keys, branch_count, chosen, row, position, branch, once):
    """log2 of how many branches show `row` the key at `position`, 0 if each counts once; NEVER if one before `branch` does."""
    count = 0
    for b in range(branch_count):
        inside = chosen >> b & 1 and keys.spans[b, 0] <= position < keys.spans[b, 1]
        if inside and abs(position - row) % keys.spans[b, 2] == 0:
            if b < branch:
                return NEVER
            count += 1
    return ZERO if once else log2(float32(count))


@device
def find_key(keys, index, branch_count, chosen, row, once):
    """Position and bias of key number `index`; -1 and NEVER past the last."""
    if index >= keys.sizes[0]:
        return -1, NEVER
    run = 0
    while index >= keys.runs[run, 2]:
        index -= keys.runs[run, 2]
        run += 1
    position = keys.runs[run, 0] + index * keys.runs[run, 1]
    if chosen & (chosen - 1) == 0:
        return position, ZERO
    return position, key_bias(keys, branch_count, chosen, row, position, keys.runs[run, 3], once)


@device
def serving(branches, head):
    """The bit set of the branches that serve query head `head`."""
    found = 0
    for b in range(branches.shape[0]):
        if branches[b, 2] <= head < branches[b, 3]:
            found |= 1 << b
    return found


@device
def masked(mask, batch, position):
    """Whether the key at `position` is to be ignored."""
    return mask.given and mask.numbers[uint64(batch * mask.batch + position * mask.row)] != 0


@device
def load(tile, source, batch, head, columns, positions, start, x, y, across, down):
    """tile[r] = source[batch, positions[start + r], head], zeros where there is no such row or column."""
    for i in range(tile.shape[0] // down):
        r = y + i * down
        position = positions[start + r]
        place = batch * source.batch + head * source.head + max(position, 0) * source.row
        there = columns if position >= 0 else 0
        for j in range((tile.shape[1] - 1) * 4 // across):
            c = x + j * across
            found = float32(source.numbers[uint64(place + min(c, columns - 1))])
            tile[r, c // 4, c % 4] = found if c < there else ZERO


@device
def column(x, j, across):
    """Which column number `j` of a thread is: its quads are `across` apart."""
    return (x + j // 4 * across) * 4 + j % 4


@device
def fetch(sums, source, batch, head, columns, positions, x, y, across, down):
    """sums = source[batch, positions[r], head]: the rows and columns of a thread that there are."""
    for i in range(sums.shape[0]):
        position = positions[y + i * down]
        place = batch * source.batch + head * source.head + max(position, 0) * source.row
        for j in range(sums.shape[1]):
            c = column(x, j, across)
            if position >= 0 and c < columns:
                sums[i, j] = float32(source.numbers[uint64(place + c)])


@device
def store(target, sums, factor, add, batch, head, columns, positions, x, y, across, down):
    """target[batch, positions[r], head] = factor * sums, or += if `add`: the rows and columns of a thread that there are."""
    for i in range(sums.shape[0]):
        position = positions[y + i * down]
        place = batch * target.batch + head * target.head + max(position, 0) * target.row
        for j in range(sums.shape[1]):
            c = column(x, j, across)
            if position >= 0 and c < columns:
                number = factor * sums[i, j]
                if add:
                    number += float32(target.numbers[uint64(place + c)])
                target.numbers[uint64(place + c)] = number


@device
def fill(products, number):
    """products[i, j] = number"""
    for i in range(products.shape[0]):
        for j in range(products.shape[1]):
            products[i, j] = number


@device
def add_dots(products, rows, others, x, y, across, down):
    """products[i, j] += rows[r] . others[c], the scalar product of two rows: r = y + i * down, c = x + j * across."""
    d = 0
    while d < rows.shape[1] - 1:
        for i in range(products.shape[0]):
            r = y + i * down
            a0, a1, a2, a3 = rows[r, d, 0], rows[r, d, 1], rows[r, d, 2], rows[r, d, 3]
            for j in range(products.shape[1]):
                c = x + j * across
                total = products[i, j]
                total += a0 * others[c, d, 0]
                total += a1 * others[c, d, 1]
                total += a2 * others[c, d, 2]
                total += a3 * others[c, d, 3]
                products[i, j] = total
        d += 1


@device
def to_scores(scores, scale, biases, met, start, offsets, limits, reverse, x, across):
    """scores = scale * scores + bias of the column + offset of the row; NEVER where `met` exceeds the row's limit, or, with
    `reverse`, is below it."""
    for i in range(scores.shape[0]):
        for j in range(scores.shape[1]):
            c = start + x + j * across
            hidden = met[c] < limits[i] if reverse else met[c] > limits[i]
            scores[i, j] = NEVER if hidden else scores[i, j] * scale + (biases[c] + offsets[i])


@device
def place(tile, numbers, x, y, across, down):
    """tile[r, c] = numbers[i, j]: r = y + i * down, c = x + j * across."""
    for i in range(numbers.shape[0]):
        for j in range(numbers.shape[1]):
            c = x + j * across
            tile[y + i * down, c // 4, c % 4] = numbers[i, j]


@device
def add_weighted(sums, weights, values, x, y, across, down):
    """sums[i] += sum over k of weights[r, k] * values[k], in the thread's quads of columns: r = y + i * down."""
    k = 0
    while k < weights.shape[1] - 1:
        for i in range(sums.shape[0]):
            r = y + i * down
            w0, w1, w2, w3 = weights[r, k, 0], weights[r, k, 1], weights[r, k, 2], weights[r, k, 3]
            for q in range(sums.shape[1] // 4):
                c = x + q * across
                for u in range(4):
                    total = sums[i, q * 4 + u]
                    total += w0 * values[k * 4, c, u]
                    total += w1 * values[k * 4 + 1, c, u]
                    total += w2 * values[k * 4 + 2, c, u]
                    total += w3 * values[k * 4 + 3, c, u]
                    sums[i, q * 4 + u] = total
        k += 1
