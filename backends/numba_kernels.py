"""The kernels in numba.cuda: attention, and its gradients for queries and for keys and values. A block computes one tile.

    score = scale * log2(e) * q.k + log2(multiplicity)      P = 2 ** (score - lse * log2(e))      out = sum_k P v
    dv = sum_q P dout      dS = P * (dout.v - delta)      dq = scale * sum_k dS k      dk = scale * sum_q dS q

`delta = dout.out`, row by row. Arithmetic is fp32, whatever the tensors hold. The rows of a tile stay in shared memory; what they
meet streams by, `keys` rows at a time. No sum is made by atomics, so equal inputs give equal bits.

All kernels take `group`: the tiles and branches of a `dilkit.tiles.Group`, and its step; and whether earlier groups have written
results that theirs join. `x` and `y` number the threads of a block, see `numba_parts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from numba import cuda, types
from numpy import float32, int32

from dilkit.backends.numba_parts import (
    ALIGN,
    NEVER,
    SIMULATED,
    ZERO,
    Keys,
    add_dots,
    add_weighted,
    column,
    device,
    exp2,
    fill,
    find_keys,
    load,
    log2,
    place,
    place_keys,
    place_rows,
    serving,
    store,
    to_scores,
)
from dilkit.backends.numba_tilings import Tiling
from dilkit.device import Capability
from dilkit.tiles import MAX_BRANCHES

LOG2E = float32(math.log2(math.e))
LN2 = float32(math.log(2.0))
ONE = float32(1.0)
COMPILING = {} if SIMULATED else {"lto": False}
"""Options: linking optimises across functions, which are all inlined already, but the code would differ from what tests see."""
MAX_RUNS = 2 * MAX_BRANCHES


@device
def new_peak(peaks, shrinks, r, highest, across):
    """Take the scores of a row into its peak: the largest so far. What was summed with the old one shrinks by shrinks[r]."""
    old = peaks[r]
    new = old
    for x in range(across):
        new = max(new, highest[r, x])
    peaks[r] = new
    shrinks[r] = exp2(old - new) if new > NEVER else ONE


def forward(tiling: Tiling) -> Callable[..., None]:
    """The kernel that computes `out` and `lse`, over query tiles: one online softmax."""
    ROWS, KEYS, DOWN, ACROSS = tiling.rows, tiling.keys, tiling.down, tiling.across
    THREADS, WINDOW, (QUADS, KEY_QUADS) = tiling.threads, tiling.window, tiling.quads
    (ROW_SHARE, KEY_SHARE, COLUMN_SHARE), PARTS = tiling.shares, ACROSS + 1

    def kernel(query, key, value, mask, masked, tiles, branches, step, first, causal, once, scale, out, lse):
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        thread, batch, tile = y * ACROSS + x, cuda.blockIdx.x % query.shape[0], cuda.blockIdx.x // query.shape[0]
        row, chosen, head, rows = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2], tiles[tile, 3]
        kv_head = head // (query.shape[2] // key.shape[2])
        own = cuda.shared.array(ROWS, int32)
        met = cuda.shared.array(WINDOW, int32)
        biases = cuda.shared.array(WINDOW, float32)
        runs = cuda.shared.array((MAX_RUNS, 4), int32)
        spans = cuda.shared.array((MAX_BRANCHES, 3), int32)
        sizes = cuda.shared.array(2, int32)
        queries = cuda.shared.array((ROWS, QUADS, 4), float32, ALIGN)
        stream = cuda.shared.array((KEYS, QUADS, 4), float32, ALIGN)
        weights = cuda.shared.array((ROWS, KEY_QUADS, 4), float32, ALIGN)
        peaks = cuda.shared.array(ROWS, float32)
        shrinks = cuda.shared.array(ROWS, float32)
        parts = cuda.shared.array((ROWS, PARTS), float32)
        scores = cuda.local.array((ROW_SHARE, KEY_SHARE), float32)
        sums = cuda.local.array((ROW_SHARE, COLUMN_SHARE), float32)
        masses = cuda.local.array(ROW_SHARE, float32)
        zeros = cuda.local.array(ROW_SHARE, float32)
        keys = Keys(runs, spans, sizes)

        place_rows(own, thread, THREADS, row, step, rows)
        if thread == 0:
            seq = query.shape[1]
            find_keys(keys, branches, chosen, row, seq, 0, row + (rows - 1) * step + 1 if causal else seq)
        cuda.syncthreads()
        load(queries, query, batch, head, own, 0, x, y, ACROSS, DOWN)
        for r in range(thread, ROWS, THREADS):
            peaks[r] = NEVER if first or own[r] < 0 else lse[batch, head, own[r]] * LOG2E
        cuda.syncthreads()
        for i in range(ROW_SHARE):
            r = y + i * DOWN
            zeros[i] = ZERO
            masses[i] = ONE if x == 0 and peaks[r] > NEVER else ZERO
            for j in range(COLUMN_SHARE):
                c = column(x, j, ACROSS)
                earlier = not first and own[r] >= 0 and c < out.shape[3]
                sums[i, j] = float32(out[batch, own[r], head, c]) if earlier else ZERO

        for window in range(0, sizes[0], WINDOW):
            cuda.syncthreads()
            place_keys(met, biases, thread, THREADS, keys, window, branches.shape[0], chosen, row, once)
            for k in range(thread, WINDOW, THREADS):
                if masked and met[k] >= 0 and mask[batch, met[k]]:
                    biases[k] = NEVER
            for start in range(0, min(WINDOW, sizes[0] - window), KEYS):
                cuda.syncthreads()
                load(stream, key, batch, kv_head, met, start, x, y, ACROSS, DOWN)
                cuda.syncthreads()
                fill(scores, ZERO)
                add_dots(scores, queries, stream, x, y, ACROSS, DOWN)
                to_scores(scores, scale * LOG2E, biases, met, start, zeros, own, causal, x, y, ACROSS, DOWN)
                for i in range(ROW_SHARE):
                    highest = NEVER
                    for j in range(KEY_SHARE):
                        highest = max(highest, scores[i, j])
                    parts[y + i * DOWN, x] = highest
                cuda.syncthreads()
                load(stream, value, batch, kv_head, met, start, x, y, ACROSS, DOWN)
                for r in range(thread, ROWS, THREADS):
                    new_peak(peaks, shrinks, r, parts, ACROSS)
                cuda.syncthreads()
                for i in range(ROW_SHARE):
                    peak, shrink = peaks[y + i * DOWN], shrinks[y + i * DOWN]
                    masses[i] *= shrink
                    for j in range(COLUMN_SHARE):
                        sums[i, j] *= shrink
                    for j in range(KEY_SHARE):
                        scores[i, j] = exp2(scores[i, j] - peak) if peak > NEVER else ZERO
                        masses[i] += scores[i, j]
                place(weights, scores, x, y, ACROSS, DOWN)
                cuda.syncthreads()
                add_weighted(sums, weights, stream, x, y, ACROSS, DOWN)

        for i in range(ROW_SHARE):
            parts[y + i * DOWN, x] = masses[i]
        cuda.syncthreads()
        for i in range(ROW_SHARE):
            r = y + i * DOWN
            mass = ZERO
            for other in range(ACROSS):
                mass += parts[r, other]
            for j in range(COLUMN_SHARE):
                sums[i, j] = sums[i, j] / mass if mass > ZERO else ZERO
            if x == 0 and own[r] >= 0:
                lse[batch, head, own[r]] = (peaks[r] + log2(mass)) * LN2 if mass > ZERO else NEVER
        store(out, sums, ONE, False, batch, head, own, x, y, ACROSS, DOWN)

    return kernel


def dots(tiling: Tiling) -> Callable[..., None]:
    """The kernel that computes `delta`, (batch, heads, seq): a thread for each row of each head."""
    ACROSS, THREADS = tiling.across, tiling.threads

    def kernel(dout, out, delta):
        batch, seq, heads, head_dim = out.shape
        item = cuda.blockIdx.x * THREADS + cuda.threadIdx.y * ACROSS + cuda.threadIdx.x
        if item < batch * seq * heads:
            b, row, head = item // (seq * heads), item // heads % seq, item % heads
            total = ZERO
            for c in range(head_dim):
                total += float32(dout[b, row, head, c]) * float32(out[b, row, head, c])
            delta[b, head, row] = total

    return kernel


def dquery(tiling: Tiling) -> Callable[..., None]:
    """The kernel that computes the gradient of queries, over query tiles."""
    ROWS, KEYS, DOWN, ACROSS = tiling.rows, tiling.keys, tiling.down, tiling.across
    THREADS, WINDOW, (QUADS, KEY_QUADS) = tiling.threads, tiling.window, tiling.quads
    ROW_SHARE, KEY_SHARE, COLUMN_SHARE = tiling.shares

    def kernel(query, key, value, mask, masked, tiles, branches, step, first, causal, once, scale, dout, lse, delta, dquery):
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        thread, batch, tile = y * ACROSS + x, cuda.blockIdx.x % query.shape[0], cuda.blockIdx.x // query.shape[0]
        row, chosen, head, rows = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2], tiles[tile, 3]
        kv_head = head // (query.shape[2] // key.shape[2])
        own = cuda.shared.array(ROWS, int32)
        met = cuda.shared.array(WINDOW, int32)
        biases = cuda.shared.array(WINDOW, float32)
        runs = cuda.shared.array((MAX_RUNS, 4), int32)
        spans = cuda.shared.array((MAX_BRANCHES, 3), int32)
        sizes = cuda.shared.array(2, int32)
        queries = cuda.shared.array((ROWS, QUADS, 4), float32, ALIGN)
        douts = cuda.shared.array((ROWS, QUADS, 4), float32, ALIGN)
        stream = cuda.shared.array((KEYS, QUADS, 4), float32, ALIGN)
        weights = cuda.shared.array((ROWS, KEY_QUADS, 4), float32, ALIGN)
        scores = cuda.local.array((ROW_SHARE, KEY_SHARE), float32)
        slopes = cuda.local.array((ROW_SHARE, KEY_SHARE), float32)
        sums = cuda.local.array((ROW_SHARE, COLUMN_SHARE), float32)
        offsets = cuda.local.array(ROW_SHARE, float32)
        deltas = cuda.local.array(ROW_SHARE, float32)
        keys = Keys(runs, spans, sizes)

        place_rows(own, thread, THREADS, row, step, rows)
        if thread == 0:
            seq = query.shape[1]
            find_keys(keys, branches, chosen, row, seq, 0, row + (rows - 1) * step + 1 if causal else seq)
        cuda.syncthreads()
        load(queries, query, batch, head, own, 0, x, y, ACROSS, DOWN)
        load(douts, dout, batch, head, own, 0, x, y, ACROSS, DOWN)
        fill(sums, ZERO)
        for i in range(ROW_SHARE):
            position = own[y + i * DOWN]
            offsets[i], deltas[i] = NEVER, ZERO
            if position >= 0 and lse[batch, head, position] > NEVER:
                offsets[i], deltas[i] = -lse[batch, head, position] * LOG2E, delta[batch, head, position]

        for window in range(0, sizes[0], WINDOW):
            cuda.syncthreads()
            place_keys(met, biases, thread, THREADS, keys, window, branches.shape[0], chosen, row, once)
            for k in range(thread, WINDOW, THREADS):
                if masked and met[k] >= 0 and mask[batch, met[k]]:
                    biases[k] = NEVER
            for start in range(0, min(WINDOW, sizes[0] - window), KEYS):
                cuda.syncthreads()
                load(stream, value, batch, kv_head, met, start, x, y, ACROSS, DOWN)
                cuda.syncthreads()
                fill(slopes, ZERO)
                add_dots(slopes, douts, stream, x, y, ACROSS, DOWN)
                cuda.syncthreads()
                load(stream, key, batch, kv_head, met, start, x, y, ACROSS, DOWN)
                cuda.syncthreads()
                fill(scores, ZERO)
                add_dots(scores, queries, stream, x, y, ACROSS, DOWN)
                to_scores(scores, scale * LOG2E, biases, met, start, offsets, own, causal, x, y, ACROSS, DOWN)
                for i in range(ROW_SHARE):
                    for j in range(KEY_SHARE):
                        slopes[i, j] = exp2(scores[i, j]) * (slopes[i, j] - deltas[i])
                place(weights, slopes, x, y, ACROSS, DOWN)
                cuda.syncthreads()
                add_weighted(sums, weights, stream, x, y, ACROSS, DOWN)

        store(dquery, sums, scale, not first, batch, head, own, x, y, ACROSS, DOWN)

    return kernel


def dkeyvalue(tiling: Tiling) -> Callable[..., None]:
    """The kernel that computes the gradients of keys and values, over key tiles: they meet the queries of all their heads."""
    ROWS, KEYS, DOWN, ACROSS = tiling.rows, tiling.keys, tiling.down, tiling.across
    THREADS, WINDOW, (QUADS, KEY_QUADS) = tiling.threads, tiling.window, tiling.quads
    ROW_SHARE, KEY_SHARE, COLUMN_SHARE = tiling.shares

    def kernel(
        query, key, value, mask, masked, tiles, branches, step, first, causal, once, scale, dout, lse, delta, dkey, dvalue
    ):
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        thread, batch, tile = y * ACROSS + x, cuda.blockIdx.x % query.shape[0], cuda.blockIdx.x // query.shape[0]
        row, shown, kv_head, rows = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2], tiles[tile, 3]
        heads = query.shape[2] // key.shape[2]
        own = cuda.shared.array(ROWS, int32)
        met = cuda.shared.array(WINDOW, int32)
        biases = cuda.shared.array(WINDOW, float32)
        deltas = cuda.shared.array(WINDOW, float32)
        runs = cuda.shared.array((MAX_RUNS, 4), int32)
        spans = cuda.shared.array((MAX_BRANCHES, 3), int32)
        sizes = cuda.shared.array(2, int32)
        keys_here = cuda.shared.array((ROWS, QUADS, 4), float32, ALIGN)
        values_here = cuda.shared.array((ROWS, QUADS, 4), float32, ALIGN)
        stream = cuda.shared.array((KEYS, QUADS, 4), float32, ALIGN)
        weights = cuda.shared.array((ROWS, KEY_QUADS, 4), float32, ALIGN)
        scores = cuda.local.array((ROW_SHARE, KEY_SHARE), float32)
        slopes = cuda.local.array((ROW_SHARE, KEY_SHARE), float32)
        key_sums = cuda.local.array((ROW_SHARE, COLUMN_SHARE), float32)
        value_sums = cuda.local.array((ROW_SHARE, COLUMN_SHARE), float32)
        offsets = cuda.local.array(ROW_SHARE, float32)
        queries = Keys(runs, spans, sizes)

        place_rows(own, thread, THREADS, row, step, rows)
        cuda.syncthreads()
        load(keys_here, key, batch, kv_head, own, 0, x, y, ACROSS, DOWN)
        load(values_here, value, batch, kv_head, own, 0, x, y, ACROSS, DOWN)
        fill(key_sums, ZERO)
        fill(value_sums, ZERO)
        for i in range(ROW_SHARE):
            position = own[y + i * DOWN]
            offsets[i] = NEVER if masked and position >= 0 and mask[batch, position] else ZERO

        for head in range(kv_head * heads, (kv_head + 1) * heads):
            chosen = shown & serving(branches, head)
            cuda.syncthreads()
            if thread == 0:
                find_keys(queries, branches, chosen, row, query.shape[1], row if causal else 0, query.shape[1])
            cuda.syncthreads()
            for window in range(0, sizes[0], WINDOW):
                cuda.syncthreads()
                place_keys(met, biases, thread, THREADS, queries, window, branches.shape[0], chosen, row, once)
                for k in range(thread, WINDOW, THREADS):
                    deltas[k] = ZERO
                    if met[k] >= 0:
                        total = lse[batch, head, met[k]]
                        biases[k] = biases[k] - total * LOG2E if total > NEVER else NEVER
                        deltas[k] = delta[batch, head, met[k]]
                for start in range(0, min(WINDOW, sizes[0] - window), KEYS):
                    cuda.syncthreads()
                    load(stream, query, batch, head, met, start, x, y, ACROSS, DOWN)
                    cuda.syncthreads()
                    fill(scores, ZERO)
                    add_dots(scores, keys_here, stream, x, y, ACROSS, DOWN)
                    to_scores(scores, scale * LOG2E, biases, met, start, offsets, own, -causal, x, y, ACROSS, DOWN)
                    for i in range(ROW_SHARE):
                        for j in range(KEY_SHARE):
                            scores[i, j] = exp2(scores[i, j])
                    place(weights, scores, x, y, ACROSS, DOWN)
                    cuda.syncthreads()
                    load(stream, dout, batch, head, met, start, x, y, ACROSS, DOWN)
                    cuda.syncthreads()
                    add_weighted(value_sums, weights, stream, x, y, ACROSS, DOWN)
                    fill(slopes, ZERO)
                    add_dots(slopes, values_here, stream, x, y, ACROSS, DOWN)
                    cuda.syncthreads()
                    load(stream, query, batch, head, met, start, x, y, ACROSS, DOWN)
                    for i in range(ROW_SHARE):
                        for j in range(KEY_SHARE):
                            slopes[i, j] = scores[i, j] * (slopes[i, j] - deltas[start + x + j * ACROSS])
                    place(weights, slopes, x, y, ACROSS, DOWN)
                    cuda.syncthreads()
                    add_weighted(key_sums, weights, stream, x, y, ACROSS, DOWN)

        store(dkey, key_sums, scale, not first, batch, kv_head, own, x, y, ACROSS, DOWN)
        store(dvalue, value_sums, ONE, not first, batch, kv_head, own, x, y, ACROSS, DOWN)

    return kernel


KERNELS = {"forward": forward, "dots": dots, "dquery": dquery, "dkeyvalue": dkeyvalue}


def signature(role: str, dtype: str) -> Any:
    """The types of a kernel's arguments; those of tensors of `dtype` allow any strides."""
    tensor = types.Array(types.float16 if dtype == "float16" else types.float32, 4, "A")
    table, by_row = types.Array(types.int32, 2, "C"), types.Array(types.float32, 3, "C")
    masking, grouping = (types.Array(types.uint8, 2, "A"), types.int32), (table, table, types.int32, types.int32)
    common = (tensor, tensor, tensor, *masking, *grouping, types.int32, types.int32, types.float32)
    arguments = {
        "forward": (*common, tensor, by_row),
        "dots": (tensor, tensor, by_row),
        "dquery": (*common, tensor, by_row, by_row, tensor),
        "dkeyvalue": (*common, tensor, by_row, by_row, tensor, tensor),
    }
    return types.void(*arguments[role])


@lru_cache(maxsize=256)
def compiled(role: str, dtype: str, tiling: Tiling, capability: Capability | None) -> Any:
    """The kernel, compiled for the current device, of `capability`; the simulator has none and compiles nothing."""
    return cuda.jit(signature(role, dtype), **COMPILING)(KERNELS[role](tiling))
