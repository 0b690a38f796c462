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

from collections import namedtuple
from collections.abc import Callable

from numba import cuda
from numpy import float32, int32, uint64

from dilkit.backends.numba.arguments import Tiling
from dilkit.backends.numba.compiling import ALIGN, LN2, LOG2E, NEG_INF, ONE, ZERO, device, exp2, log2
from dilkit.backends.numba.tiles import accumulate, load, place, rows_of, score_tile, store, sum_column
from dilkit.backends.numba.visible import block_start, look_up_keys, query_tile
from dilkit.backends.tiles.schedule import MAX_SEQ

Softmax = namedtuple("Softmax", "maxima rescales partials totals sums")
"""The state of the online softmax. By row, in shared memory: `maxima`, the largest score so far; `rescales`, the factor of what
was summed relative to the maximum before; `partials`, one number of each thread across. Of a thread, in registers: `totals`, of
the weights of its own columns, and `sums`, the accumulator."""


def forward(tiling: Tiling) -> Callable[..., None]:
    """Return the kernel that writes `out` and `lse`."""
    TILE, SCORES, SUMS, PARTIALS = tiling.row_tile, tiling.thread_scores, tiling.thread_sums, (tiling.rows, tiling.across + 1)
    ROWS, THREAD_ROWS, COLUMNS, WINDOW = tiling.rows, SCORES[0], tiling.columns, tiling.threads
    start_block = block_start(tiling)

    def kernel(problem, group, mask, query, key, value, out, lse):
        memory, thread = start_block()
        queries = cuda.shared.array(TILE, float32, ALIGN)
        maxima = cuda.shared.array(ROWS, float32)
        rescales = cuda.shared.array(ROWS, float32)
        partials = cuda.shared.array(PARTIALS, float32)
        totals = cuda.local.array(THREAD_ROWS, float32)
        sums = cuda.local.array(SUMS, float32)
        scores = cuda.local.array(SCORES, float32)
        biases = cuda.local.array(THREAD_ROWS, float32)
        limits = cuda.local.array(THREAD_ROWS, int32)
        softmax = Softmax(maxima, rescales, partials, totals, sums)

        tile, key_rows, value_rows = query_tile(cuda.blockIdx.x, memory, key, value, group, problem, thread)
        out_rows = rows_of(out, tile, tile.head, problem)
        start_rows(softmax, lse, out_rows, memory, tile, group, thread)
        load(queries, rows_of(query, tile, tile.head, problem), memory.rows, 0, thread)
        for i in range(THREAD_ROWS):
            biases[i] = ZERO
            limits[i] = memory.rows[thread.y + i * thread.down] if problem.causal else MAX_SEQ

        for window in range(0, memory.visible.sizes[0], WINDOW):
            cuda.syncthreads()
            look_up_keys(memory, window, tile, group, mask, problem, thread)
            for start in range(0, min(WINDOW, memory.visible.sizes[0] - window), COLUMNS):
                cuda.syncthreads()
                load(memory.stream, key_rows, memory.positions, start, thread)
                cuda.syncthreads()
                score_tile(scores, queries, memory, start, problem.scale, biases, limits, False, thread)
                share_maxima(softmax, scores, thread)
                cuda.syncthreads()
                load(memory.stream, value_rows, memory.positions, start, thread)
                raise_maxima(softmax, thread)
                cuda.syncthreads()
                online_softmax_step(softmax, scores, thread)
                place(memory.weights, scores, thread)
                cuda.syncthreads()
                accumulate(sums, memory.weights, memory.stream, thread)
        finish(softmax, lse, out_rows, memory, tile, thread)

    return kernel


@device
def start_rows(softmax, lse, out, memory, tile, group, thread):
    """Start from nothing, or what earlier groups have left: maxima in `lse`, and in `out` sums whose weights total 1."""
    if thread.number < softmax.maxima.shape[0]:  # a thread a row
        position = memory.rows[thread.number]
        seen = not group.first and position >= 0
        softmax.maxima[thread.number] = lse[tile.batch, tile.head, position] * LOG2E if seen else NEG_INF
    cuda.syncthreads()
    for i in range(softmax.sums.shape[0]):
        r = thread.y + i * thread.down
        softmax.totals[i] = ONE if thread.x == 0 and softmax.maxima[r] > NEG_INF else ZERO
        position = memory.rows[r]
        for j in range(softmax.sums.shape[1]):
            c = sum_column(thread, j)
            present = not group.first and position >= 0 and c < out.head_dim
            softmax.sums[i, j] = float32(out.numbers[uint64(out.first + position * out.stride + c)]) if present else ZERO


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
def finish(softmax, lse, out, memory, tile, thread):
    """Add up each row's total, divide the sums by it, and write `lse` and `out`."""
    for i in range(softmax.totals.shape[0]):
        softmax.partials[thread.y + i * thread.down, thread.x] = softmax.totals[i]
    cuda.syncthreads()
    r = thread.number
    if r < softmax.maxima.shape[0]:  # a thread a row
        total = ZERO
        for x in range(thread.across):
            total += softmax.partials[r, x]
        softmax.rescales[r] = ONE / total if total > ZERO else ZERO
        if memory.rows[r] >= 0:
            lse[tile.batch, tile.head, memory.rows[r]] = (softmax.maxima[r] + log2(total)) * LN2 if total > ZERO else NEG_INF
    cuda.syncthreads()
    for i in range(softmax.sums.shape[0]):
        for j in range(softmax.sums.shape[1]):
            softmax.sums[i, j] *= softmax.rescales[thread.y + i * thread.down]
    store(out, softmax.sums, ONE, False, memory.rows, thread)
