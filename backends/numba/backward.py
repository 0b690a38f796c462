"""The kernels of the gradients in numba.cuda: `delta`, the gradient of queries, the gradients of keys and values.

    P = 2 ** min(score - lse * log2(e), 0)  dS = P * (dout . v - delta)         delta = dout . out, row by row
    dq = scale * sum_k dS k        dk = scale * sum_q dS q        dv = sum_q P dout

    dquery, over query tiles                              dkeyvalue, over key tiles, of one query head after another
      values -> stream . douts   --> products               queries -> stream . keys  --> weights P
      keys -> stream . queries   --> weights P              douts -> stream, P        --> value sums, and . values --> products
      P, products -> dS, stream  --> sums                   queries -> stream, dS     --> key sums

The loops run over the visible keys, or queries, as in the forward. Each gradient is summed in registers, and written once.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda
from numpy import float32, int32

from dilkit.backends.numba.arguments import Tiling
from dilkit.backends.numba.compiling import ALIGN, LOG2E, NEG_INF, ONE, ZERO, device, exp2
from dilkit.backends.numba.tiles import accumulate, dot_products, fill, load, place, rows_of, score_tile, store
from dilkit.backends.numba.visible import block_start, list_queries, look_up_keys, masked, query_tile, tile_of, visible_position
from dilkit.backends.tiles.schedule import MAX_SEQ

LARGE_LSE, LSE_ROUNDING = float32(2.0**13), float32(3 * 2.0**-23)
"""Beyond the first, the rounding of an lse changes weights by 1/512 or more. The second bounds it, relative to the lse."""


def dots(tiling: Tiling) -> Callable[..., None]:
    """Return the kernel that writes `delta`, (batch, heads, seq): a thread for each row of each head."""
    ACROSS, THREADS = tiling.across, tiling.threads

    def kernel(problem, dout, out, delta):
        item = cuda.blockIdx.x * THREADS + cuda.threadIdx.y * ACROSS + cuda.threadIdx.x
        head, row, batch = item % problem.heads, item // problem.heads % problem.seq, item // problem.heads // problem.seq
        if batch < problem.batch:
            left = batch * dout.batch + row * dout.row + head * dout.head
            right = batch * out.batch + row * out.row + head * out.head
            total = ZERO
            for c in range(problem.head_dim):
                total += float32(dout.numbers[left + c]) * float32(out.numbers[right + c])
            delta[batch, head, row] = total

    return kernel


def dquery(tiling: Tiling) -> Callable[..., None]:
    """Return the kernel that writes the gradient of queries."""
    TILE, SCORES, SUMS, start_block = tiling.row_tile, tiling.thread_scores, tiling.thread_sums, block_start(tiling)
    THREAD_ROWS, COLUMNS, WINDOW = SCORES[0], tiling.columns, tiling.threads

    def kernel(problem, group, mask, query, key, value, dout, lse, delta, dquery):
        memory, thread = start_block()
        queries = cuda.shared.array(TILE, float32, ALIGN)
        douts = cuda.shared.array(TILE, float32, ALIGN)
        weights = cuda.local.array(SCORES, float32)
        products = cuda.local.array(SCORES, float32)
        sums = cuda.local.array(SUMS, float32)
        biases = cuda.local.array(THREAD_ROWS, float32)
        deltas = cuda.local.array(THREAD_ROWS, float32)
        limits = cuda.local.array(THREAD_ROWS, int32)

        tile, key_rows, value_rows = query_tile(cuda.blockIdx.x, memory, key, value, group, problem, thread)
        cuda.syncthreads()
        load(queries, rows_of(query, tile, tile.head, problem), memory.rows, 0, thread)
        load(douts, rows_of(dout, tile, tile.head, problem), memory.rows, 0, thread)
        fill(sums, ZERO)
        for i in range(THREAD_ROWS):
            position = memory.rows[thread.y + i * thread.down]
            biases[i], deltas[i] = query_terms(lse, delta, tile, tile.head, position)
            limits[i] = position if problem.causal else MAX_SEQ

        for window in range(0, memory.visible.sizes[0], WINDOW):
            cuda.syncthreads()
            look_up_keys(memory, window, tile, group, mask, problem, thread)
            for start in range(0, min(WINDOW, memory.visible.sizes[0] - window), COLUMNS):
                cuda.syncthreads()
                load(memory.stream, value_rows, memory.positions, start, thread)
                cuda.syncthreads()
                dot_products(products, douts, memory.stream, thread)
                cuda.syncthreads()
                load(memory.stream, key_rows, memory.positions, start, thread)
                cuda.syncthreads()
                score_tile(weights, queries, memory, start, problem.scale, biases, limits, False, thread)
                to_weights(weights)
                for i in range(SCORES[0]):
                    for j in range(SCORES[1]):
                        products[i, j] = weights[i, j] * (products[i, j] - deltas[i])
                place(memory.weights, products, thread)
                cuda.syncthreads()
                accumulate(sums, memory.weights, memory.stream, thread)
        store(rows_of(dquery, tile, tile.head, problem), sums, problem.scale, not group.first, memory.rows, thread)

    return kernel


def dkeyvalue(tiling: Tiling) -> Callable[..., None]:
    """Return the kernel that writes the gradients of keys and values."""
    TILE, SCORES, SUMS, start_block = tiling.row_tile, tiling.thread_scores, tiling.thread_sums, block_start(tiling)
    THREAD_ROWS, COLUMNS, WINDOW = SCORES[0], tiling.columns, tiling.threads

    def kernel(problem, group, mask, query, key, value, dout, lse, delta, dkey, dvalue):
        memory, thread = start_block()
        keys = cuda.shared.array(TILE, float32, ALIGN)
        values = cuda.shared.array(TILE, float32, ALIGN)
        weights = cuda.local.array(SCORES, float32)
        products = cuda.local.array(SCORES, float32)
        key_sums = cuda.local.array(SUMS, float32)
        value_sums = cuda.local.array(SUMS, float32)
        biases = cuda.local.array(THREAD_ROWS, float32)
        limits = cuda.local.array(THREAD_ROWS, int32)

        tile = tile_of(cuda.blockIdx.x, memory, group, problem, thread)
        heads = problem.heads // problem.kv_heads
        cuda.syncthreads()
        load(keys, rows_of(key, tile, tile.head, problem), memory.rows, 0, thread)
        load(values, rows_of(value, tile, tile.head, problem), memory.rows, 0, thread)
        fill(key_sums, ZERO)
        fill(value_sums, ZERO)
        for i in range(THREAD_ROWS):
            position = memory.rows[thread.y + i * thread.down]
            biases[i] = NEG_INF if masked(mask, position, tile, problem) else ZERO
            limits[i] = position if problem.causal else -1

        for head in range(tile.head * heads, (tile.head + 1) * heads):
            query_rows, dout_rows = rows_of(query, tile, head, problem), rows_of(dout, tile, head, problem)
            cuda.syncthreads()
            chosen = list_queries(memory, tile, head, group, problem, thread)
            cuda.syncthreads()
            for window in range(0, memory.visible.sizes[0], WINDOW):
                cuda.syncthreads()
                look_up_queries(memory, window, tile, head, chosen, group, lse, delta, problem, thread)
                for start in range(0, min(WINDOW, memory.visible.sizes[0] - window), COLUMNS):
                    cuda.syncthreads()
                    load(memory.stream, query_rows, memory.positions, start, thread)
                    cuda.syncthreads()
                    score_tile(weights, keys, memory, start, problem.scale, biases, limits, True, thread)
                    to_weights(weights)
                    place(memory.weights, weights, thread)
                    cuda.syncthreads()
                    load(memory.stream, dout_rows, memory.positions, start, thread)
                    cuda.syncthreads()
                    accumulate(value_sums, memory.weights, memory.stream, thread)
                    dot_products(products, values, memory.stream, thread)
                    cuda.syncthreads()
                    load(memory.stream, query_rows, memory.positions, start, thread)
                    for i in range(SCORES[0]):
                        for j in range(SCORES[1]):
                            delta_of_query = memory.deltas[start + thread.x + j * thread.across]
                            products[i, j] = weights[i, j] * (products[i, j] - delta_of_query)
                    place(memory.weights, products, thread)
                    cuda.syncthreads()
                    accumulate(key_sums, memory.weights, memory.stream, thread)
        store(rows_of(dkey, tile, tile.head, problem), key_sums, problem.scale, not group.first, memory.rows, thread)
        store(rows_of(dvalue, tile, tile.head, problem), value_sums, ONE, not group.first, memory.rows, thread)

    return kernel


@device
def query_terms(lse, delta, tile, head, position):
    """Return -lse in base 2, and delta, of the query at `position`; NEG_INF and 0 if it sees nothing.

    A large lse is lowered by what rounding made of it and of the scores: the key that a row sees almost alone then has a weight
    of 1, not of 2 to a rounding error.
    """
    total = lse[tile.batch, head, max(position, 0)]
    if abs(total) > LARGE_LSE:
        total -= LSE_ROUNDING * abs(total)
    if position >= 0 and total > NEG_INF:
        return -total * LOG2E, delta[tile.batch, head, position]
    return NEG_INF, ZERO


@device
def look_up_queries(memory, window, tile, head, chosen, group, lse, delta, problem, thread):
    """Write the visible queries of `head` from number `window` on, as columns. One that sees nothing has no gradient."""
    position, bias = visible_position(memory.visible, window + thread.number, group, chosen, tile.row, problem.once)
    minus_lse, memory.deltas[thread.number] = query_terms(lse, delta, tile, head, position)
    memory.positions[thread.number] = position
    memory.biases[thread.number] = bias + minus_lse


@device
def to_weights(scores):
    """scores = 2 ** min(scores, 0): rounding takes large scores far above 0. NaN stays NaN."""
    for i in range(scores.shape[0]):
        for j in range(scores.shape[1]):
            scores[i, j] = exp2(ZERO if scores[i, j] > ZERO else scores[i, j])
