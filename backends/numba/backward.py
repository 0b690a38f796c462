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
from dilkit.backends.numba.compiling import ALIGN, ONE, ZERO, device
from dilkit.backends.numba.memory import block_memory
from dilkit.backends.numba.tiles import (
    RowTerms,
    accumulate,
    dot_products,
    fill,
    load,
    place,
    rows_of,
    score_gradients,
    score_tile,
    store,
    thread_at,
    tile_of,
    to_weights,
)
from dilkit.backends.numba.visible import branches_of_head
from dilkit.backends.numba.windows import (
    KeyValue,
    find_queries,
    find_rows,
    key_value_rows,
    look_up_keys,
    look_up_queries,
    query_tile,
    start_key_terms,
    start_query_terms,
)


def dots(tiling: Tiling) -> Callable[..., None]:
    """The kernel that writes `delta`, (batch, heads, seq): a thread for each row of each head."""
    ACROSS, THREADS = tiling.across, tiling.threads

    def kernel(sizes, dout, out, delta):
        item = cuda.blockIdx.x * THREADS + cuda.threadIdx.y * ACROSS + cuda.threadIdx.x
        head, row, batch = item % sizes.heads, item // sizes.heads % sizes.seq, item // sizes.heads // sizes.seq
        if batch < sizes.batch:
            left = batch * dout.batch + row * dout.row + head * dout.head
            right = batch * out.batch + row * out.row + head * out.head
            total = ZERO
            for c in range(sizes.head_dim):
                total += float32(dout.numbers[left + c]) * float32(out.numbers[right + c])
            delta[batch, head, row] = total

    return kernel


@device
def add_keys(sums, products, weights, terms, queries, douts, memory, rows, start, scale, thread):
    """Add to the gradient of queries what comes from the keys of a score tile, from number `start` of the window on."""
    cuda.syncthreads()
    load(memory.stream, rows.values, memory.columns.positions, start, thread)
    cuda.syncthreads()
    dot_products(products, douts, memory.stream, thread)
    cuda.syncthreads()
    load(memory.stream, rows.keys, memory.columns.positions, start, thread)
    cuda.syncthreads()
    score_tile(weights, queries, memory, start, scale, terms, False, thread)
    to_weights(weights)
    score_gradients(products, weights, memory.columns, start, terms, False, thread)
    place(memory.weights, products, thread)
    cuda.syncthreads()
    accumulate(sums, memory.weights, memory.stream, thread)


def dquery(tiling: Tiling) -> Callable[..., None]:
    """The kernel that writes the gradient of queries."""
    DOWN, ACROSS, WINDOW, COLUMNS = tiling.down, tiling.across, tiling.threads, tiling.columns
    ROW_TILE, ROWS, SCORES, SUMS = tiling.row_tile, tiling.own_rows, tiling.own_scores, tiling.own_sums
    allocate = block_memory(tiling)

    def kernel(sizes, options, group, mask, query, key, value, dout, lse, delta, dquery):
        memory = allocate()
        queries = cuda.shared.array(ROW_TILE, float32, ALIGN)
        douts = cuda.shared.array(ROW_TILE, float32, ALIGN)
        weights = cuda.local.array(SCORES, float32)
        products = cuda.local.array(SCORES, float32)
        sums = cuda.local.array(SUMS, float32)
        biases = cuda.local.array(ROWS, float32)
        deltas = cuda.local.array(ROWS, float32)
        limits = cuda.local.array(ROWS, int32)
        terms = RowTerms(biases, deltas, limits)

        thread = thread_at(cuda.threadIdx.x, cuda.threadIdx.y, ACROSS, DOWN)
        tile = query_tile(memory, sizes, options, group, thread)
        rows = key_value_rows(key, value, tile, sizes)
        cuda.syncthreads()
        load(queries, rows_of(query, tile, tile.head, sizes), memory.rows, 0, thread)
        load(douts, rows_of(dout, tile, tile.head, sizes), memory.rows, 0, thread)
        fill(sums, ZERO)
        start_query_terms(terms, lse, delta, memory, tile, options.causal, thread)

        for window in range(0, memory.visible.sizes[0], WINDOW):
            cuda.syncthreads()
            look_up_keys(memory, window, tile, group, mask, options.once, thread)
            for start in range(0, min(WINDOW, memory.visible.sizes[0] - window), COLUMNS):
                add_keys(sums, products, weights, terms, queries, douts, memory, rows, start, options.scale, thread)

        dquery_rows = rows_of(dquery, tile, tile.head, sizes)
        store(dquery_rows, sums, options.scale, not group.first, memory.rows, thread)

    return kernel


@device
def add_queries(sums, products, weights, terms, own, memory, query_rows, dout_rows, start, scale, thread):
    """Add to the gradients of keys and values what comes from the queries of a score tile, from number `start` of the window
    on."""
    cuda.syncthreads()
    load(memory.stream, query_rows, memory.columns.positions, start, thread)
    cuda.syncthreads()
    score_tile(weights, own.keys, memory, start, scale, terms, True, thread)
    to_weights(weights)
    place(memory.weights, weights, thread)
    cuda.syncthreads()
    load(memory.stream, dout_rows, memory.columns.positions, start, thread)
    cuda.syncthreads()
    accumulate(sums.values, memory.weights, memory.stream, thread)
    dot_products(products, own.values, memory.stream, thread)
    cuda.syncthreads()
    load(memory.stream, query_rows, memory.columns.positions, start, thread)
    score_gradients(products, weights, memory.columns, start, terms, True, thread)
    place(memory.weights, products, thread)
    cuda.syncthreads()
    accumulate(sums.keys, memory.weights, memory.stream, thread)


def dkeyvalue(tiling: Tiling) -> Callable[..., None]:
    """The kernel that writes the gradients of keys and values."""
    DOWN, ACROSS, WINDOW, COLUMNS = tiling.down, tiling.across, tiling.threads, tiling.columns
    ROW_TILE, ROWS, SCORES, SUMS = tiling.row_tile, tiling.own_rows, tiling.own_scores, tiling.own_sums
    allocate = block_memory(tiling)

    def kernel(sizes, options, group, mask, query, key, value, dout, lse, delta, dkey, dvalue):
        memory = allocate()
        keys = cuda.shared.array(ROW_TILE, float32, ALIGN)
        values = cuda.shared.array(ROW_TILE, float32, ALIGN)  # a line of its own, by which the simulator tells arrays apart
        own = KeyValue(keys, values)
        weights = cuda.local.array(SCORES, float32)
        products = cuda.local.array(SCORES, float32)
        sums = KeyValue(cuda.local.array(SUMS, float32), cuda.local.array(SUMS, float32))
        biases = cuda.local.array(ROWS, float32)
        limits = cuda.local.array(ROWS, int32)
        terms = RowTerms(biases, biases, limits)  # its deltas are not used: those of queries are with the columns

        thread = thread_at(cuda.threadIdx.x, cuda.threadIdx.y, ACROSS, DOWN)
        tile = tile_of(cuda.blockIdx.x, group, sizes.batch)
        heads = sizes.heads // sizes.kv_heads
        find_rows(memory, tile, thread)
        cuda.syncthreads()
        load(own.keys, rows_of(key, tile, tile.head, sizes), memory.rows, 0, thread)
        load(own.values, rows_of(value, tile, tile.head, sizes), memory.rows, 0, thread)
        fill(sums.keys, ZERO)
        fill(sums.values, ZERO)
        start_key_terms(terms, mask, memory, tile, options.causal, thread)

        for head in range(tile.head * heads, (tile.head + 1) * heads):
            chosen = tile.branches & branches_of_head(group.branches, head)
            query_rows, dout_rows = rows_of(query, tile, head, sizes), rows_of(dout, tile, head, sizes)
            cuda.syncthreads()
            find_queries(memory, tile, chosen, group, sizes.seq, options.causal, thread)
            cuda.syncthreads()
            for window in range(0, memory.visible.sizes[0], WINDOW):
                cuda.syncthreads()
                look_up_queries(memory, window, tile, head, chosen, group, lse, delta, options.once, thread)
                for start in range(0, min(WINDOW, memory.visible.sizes[0] - window), COLUMNS):
                    add_queries(
                        *(sums, products, weights, terms, own, memory, query_rows, dout_rows, start, options.scale, thread)
                    )

        store(rows_of(dkey, tile, tile.head, sizes), sums.keys, options.scale, not group.first, memory.rows, thread)
        store(rows_of(dvalue, tile, tile.head, sizes), sums.values, ONE, not group.first, memory.rows, thread)

    return kernel
