"""Shared memory of a block, and its tile: device functions that find rows, and the positions that the rows see.

    tile of the schedule --> rows, a thread each
                         --> runs of visible positions, by one thread --> window of columns: positions and biases, a thread each

All rows of a tile see the same keys. They are listed as runs: for each branch, shortest segment first, the positions that are
congruent to the tile's row modulo the dilation rate, without the stretch that an earlier branch of a dividing rate has listed.
A key that is listed a second time all the same gets the bias NEG_INF there, so that each key is scored once. The queries that
see a tile of keys are listed alike.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

from numba import cuda
from numpy import float32, int32, uint32, uint64

from dilkit.backends.numba.arguments import Tiling
from dilkit.backends.numba.compiling import ALIGN, NEG_INF, ZERO, device, log2
from dilkit.backends.numba.tiles import rows_of
from dilkit.backends.tiles.schedule import MAX_BRANCHES

MAX_RUNS = 2 * MAX_BRANCHES

Thread = namedtuple("Thread", "x y number across down")
"""A thread's place in its block of `down x across` threads, and its number there."""

Tile = namedtuple("Tile", "row branches step head rows batch")
"""A tile of the schedule: rows `row, row + step, ...`, the bit set of its branches, its head, and its place in the batch."""

VisibleRuns = namedtuple("VisibleRuns", "runs segments sizes")
"""The positions that a tile sees, in shared memory. `runs`: (first, count, branch); `segments`: (start, stop, rate) of each
branch's segment that the tile's row is in; `sizes`: the number of positions, and of runs."""

BlockMemory = namedtuple("BlockMemory", "rows visible positions biases deltas stream weights")
"""Shared memory of a block.

`rows`: positions of the tile's rows (-1: none). `visible`: all positions that they see. `positions` (-1: none), `biases`, added
to scores in base 2, and `deltas` of queries: a window of that as columns, one a thread. `stream`: the numbers of the columns of
a score tile. `weights`: those of a score tile, to multiply `stream` by.
"""


def block_start(tiling: Tiling) -> Callable[..., Any]:
    """Return a device function that returns the `BlockMemory` of its block, and its `Thread`."""
    DOWN, ACROSS, ROWS, WINDOW = tiling.down, tiling.across, tiling.rows, tiling.threads
    STREAM, WEIGHTS = (tiling.columns, tiling.head_dim // 4 + 1, 4), (tiling.rows, tiling.columns // 4 + 1, 4)

    def start_block():
        rows = cuda.shared.array(ROWS, int32)
        runs = cuda.shared.array((MAX_RUNS, 3), int32)
        segments = cuda.shared.array((MAX_BRANCHES, 3), int32)
        sizes = cuda.shared.array(2, int32)
        positions = cuda.shared.array(WINDOW, int32)
        biases = cuda.shared.array(WINDOW, float32)
        deltas = cuda.shared.array(WINDOW, float32)
        stream = cuda.shared.array(STREAM, float32, ALIGN)
        weights = cuda.shared.array(WEIGHTS, float32, ALIGN)
        memory = BlockMemory(rows, VisibleRuns(runs, segments, sizes), positions, biases, deltas, stream, weights)
        x, y = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        return memory, Thread(x, y, y * ACROSS + x, ACROSS, DOWN)

    return device(start_block)


@device
def tile_of(block, memory, group, problem, thread):
    """Return the tile of block number `block`, and write the positions of its rows; -1 beyond the last."""
    tiles, number = group.tiles, block // problem.batch
    head, rows = int32(tiles[number, 3] & 0xFFFF), int32(tiles[number, 3] >> 16)
    tile = Tile(tiles[number, 0], tiles[number, 1], tiles[number, 2], head, rows, block % problem.batch)
    if thread.number < memory.rows.shape[0]:
        memory.rows[thread.number] = tile.row + thread.number * tile.step if thread.number < rows else -1
    return tile


@device
def query_tile(block, memory, key, value, group, problem, thread):
    """Return the query tile of block number `block`, and the rows of its keys and values; list the keys that its rows see."""
    tile = tile_of(block, memory, group, problem, thread)
    if thread.number == 0:
        highest = tile.row + (tile.rows - 1) * tile.step + 1 if problem.causal else problem.seq
        list_visible(memory.visible, group, tile.branches, tile.row, problem.seq, 0, highest)
    head = tile.head // (problem.heads // problem.kv_heads)
    return tile, rows_of(key, tile, head, problem), rows_of(value, tile, head, problem)


@device
def list_queries(memory, tile, head, group, problem, thread):
    """List the queries of `head` that see the rows of a key tile. Return the bit set of the branches that show them."""
    chosen = 0
    for b in range(group.branches.shape[0]):
        if group.branches[b, 2] <= head < group.branches[b, 3]:
            chosen |= tile.branches & 1 << b
    if thread.number == 0:
        lowest = tile.row if problem.causal else 0
        list_visible(memory.visible, group, chosen, tile.row, problem.seq, lowest, problem.seq)
    return chosen


@device
def list_visible(visible, group, chosen, row, seq, lowest, highest):
    """List what `row` sees through the branches of the set `chosen`, from `lowest` on and below `highest`, by one thread."""
    visible.sizes[0] = 0
    visible.sizes[1] = 0
    for b in range(group.branches.shape[0]):
        if chosen >> b & 1:
            segment, rate = group.branches[b, 0], group.branches[b, 1]
            low = row // segment * segment
            high = min(low + segment, seq)
            visible.segments[b, 0] = low
            visible.segments[b, 1] = high
            visible.segments[b, 2] = rate
            covered_from, covered_to = high, high
            for j in range(b):
                if chosen >> j & 1 and rate % visible.segments[j, 2] == 0:
                    covered_from, covered_to = max(low, visible.segments[j, 0]), min(high, visible.segments[j, 1])
            add_run(visible, row, b, max(low, lowest), min(covered_from, highest))
            add_run(visible, row, b, max(covered_to, lowest), min(high, highest))


@device
def add_run(visible, row, branch, low, high):
    """Append the positions of `branch` from `low` on and below `high`, both inside its segment."""
    rate = visible.segments[branch, 2]
    first = low + (row - low) % rate
    if first < high:
        count, run = (high - first - 1) // rate + 1, visible.sizes[1]
        visible.runs[run, 0] = first
        visible.runs[run, 1] = count
        visible.runs[run, 2] = branch
        visible.sizes[0] += count
        visible.sizes[1] += 1


@device
def look_up_keys(memory, window, tile, group, mask, problem, thread):
    """Write the visible keys from number `window` on, as columns."""
    position, bias = visible_position(memory.visible, window + thread.number, group, tile.branches, tile.row, problem.once)
    memory.positions[thread.number] = position
    memory.biases[thread.number] = NEG_INF if masked(mask, position, tile, problem) else bias


@device
def visible_position(visible, index, group, chosen, row, once):
    """Return position and bias of number `index` of what is listed; -1 and NEG_INF past the last.

    The bias is log2 of how many branches show the position to `row`, 0 if each counts once; NEG_INF if an earlier branch does.
    """
    if index >= visible.sizes[0]:
        return -1, NEG_INF
    run, count = 0, 0
    while index >= visible.runs[run, 1]:
        index -= visible.runs[run, 1]
        run += 1
    branch = visible.runs[run, 2]
    position = visible.runs[run, 0] + index * visible.segments[branch, 2]
    if chosen & (chosen - 1) == 0:
        return position, ZERO
    for b in range(group.branches.shape[0]):
        inside = chosen >> b & 1 and visible.segments[b, 0] <= position < visible.segments[b, 1]
        if inside and abs(position - row) % visible.segments[b, 2] == 0:
            if b < branch:
                return position, NEG_INF
            count += 1
    return position, ZERO if once else log2(float32(count))


@device
def masked(mask, position, tile, problem):
    """True if the mask ignores the key at `position`."""
    return problem.masked and mask.numbers[uint64(tile.batch * mask.batch + max(position, 0) * mask.row)] != 0
