"""The forward kernel in numba.cuda: attention of one query tile a block, by one online softmax over the keys of all branches.

    score = scale * log2(e) * q . k + log2(multiplicity)        out = sum_k 2 ** (score - maximum) * v / total
                                                                lse = (maximum + log2(total)) * ln(2)

    queries (shared) --+
    keys -> stream ----+--> scores (registers) --> online softmax step --> weights (shared) --+
    values -> stream -------------------------------------------------------------------------+--> sums (registers) --> out

The loop runs over the visible keys, a window of as many as there are threads at a time, and within a window over score tiles.
Later groups of branches start from what earlier ones have left in `out` and `lse`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda
from numpy import float32, int32

from dilkit.backends.numba.arguments import Tiling
from dilkit.backends.numba.compiling import ALIGN, LN2, LOG2E, NEG_INF, ONE, ZERO, device, exp2, log2
from dilkit.backends.numba.memory import block_memory
from dilkit.backends.numba.tiles import (
    RowTerms,
    accumulate,
    fetch,
    fill,
    load,
    place,
    rows_of,
    score_tile,
    store,
    thread_at,
)
from dilkit.backends.numba.windows import key_value_rows, look_up_keys, query_tile
from dilkit.backends.tiles.schedule import MAX_SEQ


class Softmax(NamedTuple):
    """The state of the online softmax. By row, in shared memory: `maxima`, the largest score so far; `rescales`, the factor of
    what was summed relative to the maximum before; `partials`, one number of each thread across. Of a thread, in registers:
    `totals`, of the weights of its own columns, and `sums`, the accumulator."""

    maxima: Any
    rescales: Any
    partials: Any
    totals: Any
    sums: Any


@device
def start_maxima(softmax, lse, memory, tile, first, thread):
    """The maxima before any key: those that earlier groups have left in `lse`. A thread a row."""
    if thread.number < softmax.maxima.shape[0]:
        position = memory.rows[thread.number]
        softmax.maxima[thread.number] = NEG_INF if first or position < 0 else lse[tile.batch, tile.head, position] * LOG2E


@device
def start_rows(softmax, terms, memory, out, causal, first, thread):
    """The totals and sums before any key, and what is added to scores."""
    fill(softmax.sums, ZERO)
    if not first:
        fetch(softmax.sums, out, memory.rows, thread)
    for i in range(softmax.totals.shape[0]):
        r = thread.y + i * thread.down
        softmax.totals[i] = ONE if thread.x == 0 and softmax.maxima[r] > NEG_INF else ZERO
        terms.biases[i] = ZERO
        terms.limits[i] = memory.rows[r] if causal else MAX_SEQ


@device
def share_maxima(softmax, scores, thread):
    """Publish the largest score of each of the thread's rows, among its own columns."""
    for i in range(scores.shape[0]):
        highest = NEG_INF
        for j in range(scores.shape[1]):
            highest = max(highest, scores[i, j])
        softmax.partials[thread.y + i * thread.down, thread.x] = highest


@device
def raise_maxima(softmax, thread):
    """Raise each row's maximum to its new scores. A thread a row."""
    r = thread.number
    if r < softmax.maxima.shape[0]:
        old = softmax.maxima[r]
        new = old
        for x in range(thread.across):
            new = max(new, softmax.partials[r, x])
        softmax.maxima[r] = new
        softmax.rescales[r] = exp2(old - new) if new > NEG_INF else ONE


@device
def online_softmax_step(softmax, scores, thread):
    """Turn scores into weights relative to the maxima, and make totals and sums relative to the same."""
    for i in range(scores.shape[0]):
        r = thread.y + i * thread.down
        maximum, rescale = softmax.maxima[r], softmax.rescales[r]
        softmax.totals[i] *= rescale
        for j in range(softmax.sums.shape[1]):
            softmax.sums[i, j] *= rescale
        for j in range(scores.shape[1]):
            scores[i, j] = exp2(scores[i, j] - maximum) if maximum > NEG_INF else ZERO
            softmax.totals[i] += scores[i, j]


@device
def share_totals(softmax, thread):
    """Publish the thread's totals."""
    for i in range(softmax.totals.shape[0]):
        softmax.partials[thread.y + i * thread.down, thread.x] = softmax.totals[i]


@device
def finish_rows(softmax, lse, memory, tile, thread):
    """Write `lse`, and leave 1 / total in `rescales`. A thread a row."""
    r = thread.number
    if r < softmax.maxima.shape[0]:
        total = ZERO
        for x in range(thread.across):
            total += softmax.partials[r, x]
        softmax.rescales[r] = ONE / total if total > ZERO else ZERO
        if memory.rows[r] >= 0:
            lse[tile.batch, tile.head, memory.rows[r]] = (softmax.maxima[r] + log2(total)) * LN2 if total > ZERO else NEG_INF


@device
def finish_sums(softmax, thread):
    """Divide the sums by the totals of their rows."""
    for i in range(softmax.sums.shape[0]):
        for j in range(softmax.sums.shape[1]):
            softmax.sums[i, j] *= softmax.rescales[thread.y + i * thread.down]


@device
def attend(softmax, terms, scores, queries, memory, rows, start, scale, thread):
    """Attend to as many keys of the window as a score tile has columns, from number `start` on."""
    cuda.syncthreads()
    load(memory.stream, rows.keys, memory.columns.positions, start, thread)
    cuda.syncthreads()
    score_tile(scores, queries, memory, start, scale, terms, False, thread)
    share_maxima(softmax, scores, thread)
    cuda.syncthreads()
    load(memory.stream, rows.values, memory.columns.positions, start, thread)
    raise_maxima(softmax, thread)
    cuda.syncthreads()
    online_softmax_step(softmax, scores, thread)
    place(memory.weights, scores, thread)
    cuda.syncthreads()
    accumulate(softmax.sums, memory.weights, memory.stream, thread)


@device
def finish(softmax, lse, out_rows, memory, tile, thread):
    """Write `lse` and `out`."""
    share_totals(softmax, thread)
    cuda.syncthreads()
    finish_rows(softmax, lse, memory, tile, thread)
    cuda.syncthreads()
    finish_sums(softmax, thread)
    store(out_rows, softmax.sums, ONE, False, memory.rows, thread)


def softmax_memory(tiling: Tiling) -> Callable[..., Any]:
    """A device function that returns the shared part of a block's `Softmax`."""
    ROWS, PARTIALS = tiling.rows, (tiling.rows, tiling.across + 1)

    def allocate():
        maxima = cuda.shared.array(ROWS, float32)
        rescales = cuda.shared.array(ROWS, float32)
        partials = cuda.shared.array(PARTIALS, float32)
        return maxima, rescales, partials

    return device(allocate)


def forward(tiling: Tiling) -> Callable[..., None]:
    """The kernel that writes `out` and `lse`."""
    DOWN, ACROSS, WINDOW, COLUMNS = tiling.down, tiling.across, tiling.threads, tiling.columns
    ROW_TILE, ROWS, SCORES, SUMS = tiling.row_tile, tiling.own_rows, tiling.own_scores, tiling.own_sums
    allocate, allocate_softmax = block_memory(tiling), softmax_memory(tiling)

    def kernel(sizes, options, group, mask, query, key, value, out, lse):
        memory, (maxima, rescales, partials) = allocate(), allocate_softmax()
        queries = cuda.shared.array(ROW_TILE, float32, ALIGN)
        scores = cuda.local.array(SCORES, float32)
        totals = cuda.local.array(ROWS, float32)
        sums = cuda.local.array(SUMS, float32)
        biases = cuda.local.array(ROWS, float32)
        limits = cuda.local.array(ROWS, int32)
        softmax = Softmax(maxima, rescales, partials, totals, sums)
        terms = RowTerms(biases, biases, limits)  # its deltas are not used here

        thread = thread_at(cuda.threadIdx.x, cuda.threadIdx.y, ACROSS, DOWN)
        tile = query_tile(memory, sizes, options, group, thread)
        rows, out_rows = key_value_rows(key, value, tile, sizes), rows_of(out, tile, tile.head, sizes)
        start_maxima(softmax, lse, memory, tile, group.first, thread)
        cuda.syncthreads()
        load(queries, rows_of(query, tile, tile.head, sizes), memory.rows, 0, thread)
        start_rows(softmax, terms, memory, out_rows, options.causal, group.first, thread)

        for window in range(0, memory.visible.sizes[0], WINDOW):
            cuda.syncthreads()
            look_up_keys(memory, window, tile, group, mask, options.once, thread)
            for start in range(0, min(WINDOW, memory.visible.sizes[0] - window), COLUMNS):
                attend(softmax, terms, scores, queries, memory, rows, start, options.scale, thread)
        finish(softmax, lse, out_rows, memory, tile, thread)

    return kernel
