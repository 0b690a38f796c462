"""The kernels in numba.cuda: attention, and its gradients for queries and for keys and values. A block computes one tile.

    score = scale * log2(e) * q.k + log2(multiplicity)      P = 2 ** (score - lse * log2(e))      out = sum_k P v
    dv = sum_q P dout      dS = P * (dout.v - delta)      dq = scale * sum_k dS k      dk = scale * sum_q dS q

`delta = dout.out`, row by row. Arithmetic is fp32, whatever the tensors hold. The rows of a tile stay in shared memory; what they
meet streams by, `keys` rows at a time. No sum is made by atomics, so equal inputs give equal bits. Arguments are those of
`numba_call`; how threads share work, and the functions called here, are in `numba_parts`.

`own`: positions of the tile's rows. `met`: those of what they meet, looked up for a `window` of as many as there are threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from numba import cuda, types
from numpy import float32, int32, uint32

from dilkit.backends.numba.call import Group, Mask, Options, Sizes, Tiling, View
from dilkit.backends.numba.parts import (
    ALIGN,
    NEVER,
    SIMULATED,
    ZERO,
    Keys,
    add_dots,
    add_weighted,
    device,
    exp2,
    fetch,
    fill,
    find_key,
    find_keys,
    load,
    log2,
    masked,
    place,
    serving,
    store,
    to_scores,
)
from dilkit.backends.tiles.schedule import MAX_BRANCHES, MAX_SEQ
from dilkit.device import Capability

LOG2E = float32(math.log2(math.e))
LN2 = float32(math.log(2.0))
ONE = float32(1.0)
MAX_RUNS = 2 * MAX_BRANCHES


@device
def block_of(tiles, batch):
    """What the block computes: row, branches, head and rows of its tile, and its place in the batch."""
    tile = cuda.blockIdx.x // batch
    return tiles[tile, 0], tiles[tile, 1], tiles[tile, 2], tiles[tile, 3], cuda.blockIdx.x % batch


@device
def new_peak(peaks, shrinks, r, highest, across):
    """Take the scores of a row into its peak, the largest so far; what was summed with the old one shrinks by shrinks[r]."""
    old = peaks[r]
    new = old
    for x in range(across):
        new = max(new, highest[r, x])
    peaks[r] = new
    shrinks[r] = exp2(old - new) if new > NEVER else ONE


def forward(tiling: Tiling) -> Callable[..., None]:
    """The kernel that computes `out` and `lse`, over query tiles: one online softmax."""
    ROWS, KEYS, DOWN, ACROSS, WINDOW = tiling.rows, tiling.keys, tiling.down, tiling.across, tiling.threads
    (QUADS, KEY_QUADS), (ROW_SHARE, KEY_SHARE, COLUMN_SHARE), PARTS = tiling.quads, tiling.shares, tiling.across + 1

    def kernel(sizes, options, group, mask, query, key, value, out, lse):
        own = cuda.shared.array(ROWS, int32)
        met = cuda.shared.array(WINDOW, int32)
        biases = cuda.shared.array(WINDOW, float32)
        runs = cuda.shared.array((MAX_RUNS, 4), int32)
        spans = cuda.shared.array((MAX_BRANCHES, 3), int32)
        counts = cuda.shared.array(2, int32)
        queries = cuda.shared.array((ROWS, QUADS, 4), float32, ALIGN)
        stream = cuda.shared.array((KEYS, QUADS, 4), float32, ALIGN)
        weights = cuda.shared.array((ROWS, KEY_QUADS, 4), float32, ALIGN)
        parts = cuda.shared.array((ROWS, PARTS), float32)
        peaks = cuda.shared.array(ROWS, float32)
        shrinks = cuda.shared.array(ROWS, float32)
        scores = cuda.local.array((ROW_SHARE, KEY_SHARE), float32)
        sums = cuda.local.array((ROW_SHARE, COLUMN_SHARE), float32)
        masses = cuda.local.array(ROW_SHARE, float32)
        offsets = cuda.local.array(ROW_SHARE, float32)
        limits = cuda.local.array(ROW_SHARE, int32)

        x, y = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        thread = y * ACROSS + x
        keys, branches, columns = Keys(runs, spans, counts), group.branches, sizes.head_dim
        row, chosen, head, rows, batch = block_of(group.tiles, sizes.batch)
        kv_head = head // (sizes.heads // sizes.kv_heads)
        if thread == 0:
            highest = row + (rows - 1) * group.step + 1 if options.causal else sizes.seq
            find_keys(keys, branches, chosen, row, sizes.seq, 0, highest)
        if thread < ROWS:
            position = row + thread * group.step if thread < rows else -1
            own[thread] = position
            peaks[thread] = NEVER if group.first or position < 0 else lse[batch, head, position] * LOG2E
        cuda.syncthreads()
        load(queries, query, batch, head, columns, own, 0, x, y, ACROSS, DOWN)
        fill(sums, ZERO)
        if not group.first:
            fetch(sums, out, batch, head, columns, own, x, y, ACROSS, DOWN)
        for i in range(ROW_SHARE):
            offsets[i] = ZERO
            masses[i] = ONE if x == 0 and peaks[y + i * DOWN] > NEVER else ZERO
            limits[i] = own[y + i * DOWN] if options.causal else MAX_SEQ

        for window in range(0, counts[0], WINDOW):
            cuda.syncthreads()
            position, bias = find_key(keys, window + thread, branches.shape[0], chosen, row, options.once)
            met[thread] = position
            biases[thread] = NEVER if masked(mask, batch, max(position, 0)) else bias
            for start in range(0, min(WINDOW, counts[0] - window), KEYS):
                cuda.syncthreads()
                load(stream, key, batch, kv_head, columns, met, start, x, y, ACROSS, DOWN)
                cuda.syncthreads()
                fill(scores, ZERO)
                add_dots(scores, queries, stream, x, y, ACROSS, DOWN)
                to_scores(scores, options.scale * LOG2E, biases, met, start, offsets, limits, False, x, ACROSS)
                for i in range(ROW_SHARE):
                    highest = NEVER
                    for j in range(KEY_SHARE):
                        highest = max(highest, scores[i, j])
                    parts[y + i * DOWN, x] = highest
                cuda.syncthreads()
                load(stream, value, batch, kv_head, columns, met, start, x, y, ACROSS, DOWN)
                if thread < ROWS:
                    new_peak(peaks, shrinks, thread, parts, ACROSS)
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
        if thread < ROWS:
            mass = ZERO
            for other in range(ACROSS):
                mass += parts[thread, other]
            shrinks[thread] = ONE / mass if mass > ZERO else ZERO
            if own[thread] >= 0:
                lse[batch, head, own[thread]] = (peaks[thread] + log2(mass)) * LN2 if mass > ZERO else NEVER
        cuda.syncthreads()
        for i in range(ROW_SHARE):
            for j in range(COLUMN_SHARE):
                sums[i, j] *= shrinks[y + i * DOWN]
        store(out, sums, ONE, False, batch, head, columns, own, x, y, ACROSS, DOWN)

    return kernel


def dots(tiling: Tiling) -> Callable[..., None]:
    """The kernel that computes `delta`, (batch, heads, seq): a thread for each row of each head."""
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


def dquery(tiling: Tiling) -> Callable[..., None]:
    """The kernel that computes the gradient of queries, over query tiles."""
    ROWS, KEYS, DOWN, ACROSS, WINDOW = tiling.rows, tiling.keys, tiling.down, tiling.across, tiling.threads
    (QUADS, KEY_QUADS), (ROW_SHARE, KEY_SHARE, COLUMN_SHARE) = tiling.quads, tiling.shares

    def kernel(sizes, options, group, mask, query, key, value, dout, lse, delta, dquery):
        own = cuda.shared.array(ROWS, int32)
        met = cuda.shared.array(WINDOW, int32)
        biases = cuda.shared.array(WINDOW, float32)
        runs = cuda.shared.array((MAX_RUNS, 4), int32)
        spans = cuda.shared.array((MAX_BRANCHES, 3), int32)
        counts = cuda.shared.array(2, int32)
        queries = cuda.shared.array((ROWS, QUADS, 4), float32, ALIGN)
        douts = cuda.shared.array((ROWS, QUADS, 4), float32, ALIGN)
        stream = cuda.shared.array((KEYS, QUADS, 4), float32, ALIGN)
        weights = cuda.shared.array((ROWS, KEY_QUADS, 4), float32, ALIGN)
        scores = cuda.local.array((ROW_SHARE, KEY_SHARE), float32)
        slopes = cuda.local.array((ROW_SHARE, KEY_SHARE), float32)
        sums = cuda.local.array((ROW_SHARE, COLUMN_SHARE), float32)
        offsets = cuda.local.array(ROW_SHARE, float32)
        deltas = cuda.local.array(ROW_SHARE, float32)
        limits = cuda.local.array(ROW_SHARE, int32)

        x, y = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        thread = y * ACROSS + x
        keys, branches, columns = Keys(runs, spans, counts), group.branches, sizes.head_dim
        row, chosen, head, rows, batch = block_of(group.tiles, sizes.batch)
        kv_head = head // (sizes.heads // sizes.kv_heads)
        if thread == 0:
            highest = row + (rows - 1) * group.step + 1 if options.causal else sizes.seq
            find_keys(keys, branches, chosen, row, sizes.seq, 0, highest)
        if thread < ROWS:
            own[thread] = row + thread * group.step if thread < rows else -1
        cuda.syncthreads()
        load(queries, query, batch, head, columns, own, 0, x, y, ACROSS, DOWN)
        load(douts, dout, batch, head, columns, own, 0, x, y, ACROSS, DOWN)
        fill(sums, ZERO)
        for i in range(ROW_SHARE):
            position = own[y + i * DOWN]
            total = lse[batch, head, max(position, 0)]
            seen = position >= 0 and total > NEVER
            offsets[i] = -total * LOG2E if seen else NEVER
            deltas[i] = delta[batch, head, position] if seen else ZERO
            limits[i] = position if options.causal else MAX_SEQ

        for window in range(0, counts[0], WINDOW):
            cuda.syncthreads()
            position, bias = find_key(keys, window + thread, branches.shape[0], chosen, row, options.once)
            met[thread] = position
            biases[thread] = NEVER if masked(mask, batch, max(position, 0)) else bias
            for start in range(0, min(WINDOW, counts[0] - window), KEYS):
                cuda.syncthreads()
                load(stream, value, batch, kv_head, columns, met, start, x, y, ACROSS, DOWN)
                cuda.syncthreads()
                fill(slopes, ZERO)
                add_dots(slopes, douts, stream, x, y, ACROSS, DOWN)
                cuda.syncthreads()
                load(stream, key, batch, kv_head, columns, met, start, x, y, ACROSS, DOWN)
                cuda.syncthreads()
                fill(scores, ZERO)
                add_dots(scores, queries, stream, x, y, ACROSS, DOWN)
                to_scores(scores, options.scale * LOG2E, biases, met, start, offsets, limits, False, x, ACROSS)
                for i in range(ROW_SHARE):
                    for j in range(KEY_SHARE):
                        slopes[i, j] = exp2(scores[i, j]) * (slopes[i, j] - deltas[i])
                place(weights, slopes, x, y, ACROSS, DOWN)
                cuda.syncthreads()
                add_weighted(sums, weights, stream, x, y, ACROSS, DOWN)

        store(dquery, sums, options.scale, not group.first, batch, head, columns, own, x, y, ACROSS, DOWN)

    return kernel


def dkeyvalue(tiling: Tiling) -> Callable[..., None]:
    """The kernel that computes the gradients of keys and values, over key tiles: they meet the queries of all their heads."""
    ROWS, KEYS, DOWN, ACROSS, WINDOW = tiling.rows, tiling.keys, tiling.down, tiling.across, tiling.threads
    (QUADS, KEY_QUADS), (ROW_SHARE, KEY_SHARE, COLUMN_SHARE) = tiling.quads, tiling.shares

    def kernel(sizes, options, group, mask, query, key, value, dout, lse, delta, dkey, dvalue):
        own = cuda.shared.array(ROWS, int32)
        met = cuda.shared.array(WINDOW, int32)
        biases = cuda.shared.array(WINDOW, float32)
        deltas = cuda.shared.array(WINDOW, float32)
        runs = cuda.shared.array((MAX_RUNS, 4), int32)
        spans = cuda.shared.array((MAX_BRANCHES, 3), int32)
        counts = cuda.shared.array(2, int32)
        own_keys = cuda.shared.array((ROWS, QUADS, 4), float32, ALIGN)
        own_values = cuda.shared.array((ROWS, QUADS, 4), float32, ALIGN)
        stream = cuda.shared.array((KEYS, QUADS, 4), float32, ALIGN)
        weights = cuda.shared.array((ROWS, KEY_QUADS, 4), float32, ALIGN)
        scores = cuda.local.array((ROW_SHARE, KEY_SHARE), float32)
        slopes = cuda.local.array((ROW_SHARE, KEY_SHARE), float32)
        key_sums = cuda.local.array((ROW_SHARE, COLUMN_SHARE), float32)
        value_sums = cuda.local.array((ROW_SHARE, COLUMN_SHARE), float32)
        offsets = cuda.local.array(ROW_SHARE, float32)
        limits = cuda.local.array(ROW_SHARE, int32)

        x, y = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        thread = y * ACROSS + x
        queries, branches, columns = Keys(runs, spans, counts), group.branches, sizes.head_dim
        row, shown, kv_head, rows, batch = block_of(group.tiles, sizes.batch)
        heads = sizes.heads // sizes.kv_heads
        if thread < ROWS:
            own[thread] = row + thread * group.step if thread < rows else -1
        cuda.syncthreads()
        load(own_keys, key, batch, kv_head, columns, own, 0, x, y, ACROSS, DOWN)
        load(own_values, value, batch, kv_head, columns, own, 0, x, y, ACROSS, DOWN)
        fill(key_sums, ZERO)
        fill(value_sums, ZERO)
        for i in range(ROW_SHARE):
            position = own[y + i * DOWN]
            offsets[i] = NEVER if masked(mask, batch, max(position, 0)) else ZERO
            limits[i] = position if options.causal else -1

        for head in range(kv_head * heads, (kv_head + 1) * heads):
            chosen = shown & serving(branches, head)
            cuda.syncthreads()
            if thread == 0:
                find_keys(queries, branches, chosen, row, sizes.seq, row if options.causal else 0, sizes.seq)
            cuda.syncthreads()
            for window in range(0, counts[0], WINDOW):
                cuda.syncthreads()
                position, bias = find_key(queries, window + thread, branches.shape[0], chosen, row, options.once)
                total = lse[batch, head, max(position, 0)]
                seen = position >= 0 and total > NEVER
                met[thread] = position
                biases[thread] = bias - total * LOG2E if seen else NEVER
                deltas[thread] = delta[batch, head, position] if seen else ZERO
                for start in range(0, min(WINDOW, counts[0] - window), KEYS):
                    cuda.syncthreads()
                    load(stream, query, batch, head, columns, met, start, x, y, ACROSS, DOWN)
                    cuda.syncthreads()
                    fill(scores, ZERO)
                    add_dots(scores, own_keys, stream, x, y, ACROSS, DOWN)
                    to_scores(scores, options.scale * LOG2E, biases, met, start, offsets, limits, True, x, ACROSS)
                    for i in range(ROW_SHARE):
                        for j in range(KEY_SHARE):
                            scores[i, j] = exp2(scores[i, j])
                    place(weights, scores, x, y, ACROSS, DOWN)
                    cuda.syncthreads()
                    load(stream, dout, batch, head, columns, met, start, x, y, ACROSS, DOWN)
                    cuda.syncthreads()
                    add_weighted(value_sums, weights, stream, x, y, ACROSS, DOWN)
                    fill(slopes, ZERO)
                    add_dots(slopes, own_values, stream, x, y, ACROSS, DOWN)
                    cuda.syncthreads()
                    load(stream, query, batch, head, columns, met, start, x, y, ACROSS, DOWN)
                    for i in range(ROW_SHARE):
                        for j in range(KEY_SHARE):
                            slopes[i, j] = scores[i, j] * (slopes[i, j] - deltas[start + x + j * ACROSS])
                    place(weights, slopes, x, y, ACROSS, DOWN)
                    cuda.syncthreads()
                    add_weighted(key_sums, weights, stream, x, y, ACROSS, DOWN)

        store(dkey, key_sums, options.scale, not group.first, batch, kv_head, columns, own, x, y, ACROSS, DOWN)
        store(dvalue, value_sums, ONE, not group.first, batch, kv_head, columns, own, x, y, ACROSS, DOWN)

    return kernel


KERNELS = {"forward": forward, "dots": dots, "dquery": dquery, "dkeyvalue": dkeyvalue}

COMPILING = {} if SIMULATED else {"lto": False}
"""Options: no optimising when linking, which wins nothing, all functions being inlined, and is not what the tests look at."""


def signature(role: str, dtype: str) -> Any:
    """The types of a kernel's arguments."""
    numbers = types.Array(types.float16 if dtype == "float16" else types.float32, 1, "C")
    table, by_row = types.Array(types.int32, 2, "C"), types.Array(types.float32, 3, "C")
    view = types.NamedTuple((numbers, types.int64, types.int64, types.int64), View)
    mask = types.NamedTuple((types.Array(types.uint8, 1, "C"), types.int64, types.int64, types.int32), Mask)
    sizes = types.NamedUniTuple(types.int32, 5, Sizes)
    options = types.NamedTuple((types.int32, types.int32, types.float32), Options)
    group = types.NamedTuple((table, table, types.int32, types.int32), Group)
    common = sizes, options, group, mask, view, view, view
    return types.void(
        *{
            "forward": (*common, view, by_row),
            "dots": (sizes, view, view, by_row),
            "dquery": (*common, view, by_row, by_row, view),
            "dkeyvalue": (*common, view, by_row, by_row, view, view),
        }[role]
    )


@lru_cache(maxsize=256)
def compiled(role: str, dtype: str, tiling: Tiling, capability: Capability | None) -> Any:
    """The kernel, compiled for the current device, of `capability`; the simulator has none and compiles nothing."""
    return cuda.jit(signature(role, dtype), **COMPILING)(KERNELS[role](tiling))
