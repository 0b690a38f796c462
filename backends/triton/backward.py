"""The kernels of the gradients in Triton: `delta`, the gradient of queries, the gradients of keys and values.

    P = 2 ** min(score - lse * log2(e), 0)  dS = P * (dout . v - delta)         delta = dout . out, row by row
    dq = scale * sum_k dS k        dk = scale * sum_q dS q        dv = sum_q P dout        dS times softcap' in dq and dk

    dquery, over tiles of queries                         dkeyvalue, over tiles of keys, one query head after another
      strip --> keys   -- . queries --> P ---+              strip --> queries -- . keys   --> P ---+--> . douts   --> dvalue
            --> values -- . douts   --> dS <-+                    --> douts   -- . values --> dS <-+
                          dS . keys --> dquery                                    dS . queries --> dkey

Rounding takes exponents of large scores far above 0. A large lse is less by its rounding (`load_sums`).

Row i of a tile sees the columns from `i - back` to `i + ahead`: for keys the two have changed places.

A program computes one tile for one element of the batch, sums its gradients in registers and writes them once: no atomics, but
for the gradient of the weights of a bias, of which each program adds to a line of its own. With
the `lse` of the whole softmax every part of a gradient is exact by itself, so later groups add to what earlier ones have written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dilkit.backends.triton.products import rounded
from dilkit.backends.triton.scores import at_most_zero, below_cap, biased, capped_scores, learn
from dilkit.backends.triton.tiles import (
    by_row,
    load_rows,
    load_sums,
    not_ignored,
    scored_keys,
    span_at,
    store_rows,
    strip_at,
    strip_of_turn,
    tile_at,
    turns,
    within,
)


@triton.jit(do_not_specialize=["seq", "heads"])
def dots(dout, out, delta, seq, heads, DIM: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Write `delta`, `(batch, heads, seq)`: a program for `ROWS` rows of one head."""
    blocks = tl.cdiv(seq, ROWS)
    rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    head, batch = tl.program_id(0) // blocks % heads, tl.program_id(0) // blocks // heads
    there = rows < seq
    left = load_rows(dout, batch, head, rows, there, DIM, SIZE).to(tl.float32)
    right = load_rows(out, batch, head, rows, there, DIM, SIZE).to(tl.float32)
    tl.store(by_row(delta, batch, head, heads, seq) + rows, tl.sum(rounded(left, right), 1), mask=there)


@triton.jit
def add_keys(
    sums, queries, douts, lses, deltas, rows, key, value, flags, table, lowered, span, batch, head, kv_head, base, back,
    ahead, scale2, CUT: tl.constexpr, MASKED: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, SOFTCAP: tl.constexpr, METRIC: tl.constexpr, DIMS: tl.constexpr, LEARNED: tl.constexpr,
):  # fmt: skip
    """Add to the gradient of queries what comes from keys: strips of a span that a bound has `CUT`, or the others."""
    first, end = turns(span, CUT)
    for turn in range(first, end):
        keys, scores, capped, positions, there = scored_keys(
            queries, rows, key, flags, table, lowered, span, turn, batch, head, kv_head, base, back, ahead, scale2,
            CUT, MASKED, DIM, SIZE, COLUMNS, PRECISION, SOFTCAP, METRIC, DIMS,
        )  # fmt: skip
        values = load_rows(value, batch, kv_head, positions, there, DIM, SIZE)
        weights = tl.exp2(at_most_zero(scores - lses[:, None]))
        products = tl.dot(douts, values.T, input_precision=PRECISION) - deltas[:, None]
        if LEARNED:
            learn(weights * products, lowered, tl.program_id(0), batch, rows, positions, METRIC, DIMS)
        products = below_cap(products, capped, SOFTCAP)
        sums = tl.dot((weights * products).to(keys.dtype), keys, sums, input_precision=PRECISION)
    return sums


@triton.jit(do_not_specialize=["mask", "batches", "seq", "heads", "group", "back", "ahead"])
def dquery(
    query, key, value, dout, lse, delta, dquery, mask, table, lowered, batches, seq, heads, group, back, ahead, scale, scale2,
    FIRST: tl.constexpr, BOUNDED: tl.constexpr, MASKED: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr, METRIC: tl.constexpr,
    DIMS: tl.constexpr, LEARNED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of queries, or add to it unless `FIRST`."""
    tile, batch = tl.program_id(0) // batches, tl.program_id(0) % batches
    rows, there, head, base = tile_at(table, tile, ROWS)
    queries = load_rows(query, batch, head, rows, there, DIM, SIZE)
    douts = load_rows(dout, batch, head, rows, there, DIM, SIZE)
    lses, deltas = load_sums(lse, delta, batch, head, heads, seq, rows, there)
    span, flags = span_at(table, tile), mask + batch.to(tl.int64) * seq
    sums = tl.zeros([ROWS, SIZE], tl.float32)
    kv_head = head // group
    sums = add_keys(
        sums, queries, douts, lses, deltas, rows, key, value, flags, table, lowered, span, batch, head, kv_head, base, back,
        ahead, scale2, False, MASKED, DIM, SIZE, COLUMNS, PRECISION, SOFTCAP, METRIC, DIMS, LEARNED,
    )  # fmt: skip
    if BOUNDED:
        sums = add_keys(
            sums, queries, douts, lses, deltas, rows, key, value, flags, table, lowered, span, batch, head, kv_head, base, back,
            ahead, scale2, True, MASKED, DIM, SIZE, COLUMNS, PRECISION, SOFTCAP, METRIC, DIMS, LEARNED,
        )  # fmt: skip
    store_rows(dquery, batch, head, rows, there, sums * scale, not FIRST, DIM, SIZE)


@triton.jit
def add_queries(
    key_sums, value_sums, keys, values, rows, query, dout, lse, delta, table, lowered, span, batch, head, heads, seq, base, back,
    ahead, scale2, CUT: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr, METRIC: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of keys and values what comes from queries, in the same way."""
    first, end = turns(span, CUT)
    for turn in range(first, end):
        positions, there, bias = strip_at(table, strip_of_turn(span, turn, CUT), base, COLUMNS)
        lses, deltas = load_sums(lse, delta, batch, head, heads, seq, positions, there)
        queries = load_rows(query, batch, head, positions, there, DIM, SIZE)
        douts = load_rows(dout, batch, head, positions, there, DIM, SIZE)
        capped = capped_scores(tl.dot(keys, queries.T, input_precision=PRECISION), scale2, SOFTCAP)
        scores = biased(capped + (bias - lses)[None, :], lowered, batch, head, rows, positions, -1, METRIC, DIMS)
        if CUT:
            scores = within(scores, rows, positions, back, ahead)
        weights = tl.exp2(at_most_zero(scores))
        value_sums = tl.dot(weights.to(douts.dtype), douts, value_sums, input_precision=PRECISION)
        products = tl.dot(values, douts.T, input_precision=PRECISION) - deltas[None, :]
        products = below_cap(products, capped, SOFTCAP)
        key_sums = tl.dot((weights * products).to(queries.dtype), queries, key_sums, input_precision=PRECISION)
    return key_sums, value_sums


@triton.jit(do_not_specialize=["mask", "batches", "seq", "heads", "group", "back", "ahead"])
def dkeyvalue(
    query, key, value, dout, lse, delta, dkey, dvalue, mask, table, lowered, batches, seq, heads, group, back, ahead, scale,
    scale2, FIRST: tl.constexpr, BOUNDED: tl.constexpr, MASKED: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr, METRIC: tl.constexpr,
    DIMS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of keys and values, or add to them unless `FIRST`. Those of ignored keys are zero."""
    tile, batch = tl.program_id(0) // batches, tl.program_id(0) % batches
    rows, there, kv_head, base = tile_at(table, tile, ROWS)
    real = there
    if MASKED:
        real = not_ignored(mask + batch.to(tl.int64) * seq, rows, there)
    keys = load_rows(key, batch, kv_head, rows, real, DIM, SIZE)
    values = load_rows(value, batch, kv_head, rows, real, DIM, SIZE)
    key_sums, value_sums = tl.zeros([ROWS, SIZE], tl.float32), tl.zeros([ROWS, SIZE], tl.float32)
    for i in range(group):
        head, span = kv_head * group + i, span_at(table, tile * group + i)
        key_sums, value_sums = add_queries(
            key_sums, value_sums, keys, values, rows, query, dout, lse, delta, table, lowered, span, batch, head, heads, seq,
            base, back, ahead, scale2, False, DIM, SIZE, COLUMNS, PRECISION, SOFTCAP, METRIC, DIMS,
        )  # fmt: skip
        if BOUNDED:
            key_sums, value_sums = add_queries(
                key_sums, value_sums, keys, values, rows, query, dout, lse, delta, table, lowered, span, batch, head, heads, seq,
                base, back, ahead, scale2, True, DIM, SIZE, COLUMNS, PRECISION, SOFTCAP, METRIC, DIMS,
            )  # fmt: skip
    if MASKED:  # their rows of zeros have weights all the same
        key_sums = tl.where(real[:, None], key_sums, 0.0)
        value_sums = tl.where(real[:, None], value_sums, 0.0)
    store_rows(dkey, batch, kv_head, rows, there, key_sums * scale, not FIRST, DIM, SIZE)
    store_rows(dvalue, batch, kv_head, rows, there, value_sums, not FIRST, DIM, SIZE)
