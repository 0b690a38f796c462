"""The forward kernel in Triton: attention of one tile of queries, by one online softmax over the keys of all branches.

    score = log2(e) * (softcap(scale * q . k) + bias) + log2(multiplicity)    out = sum_k 2 ** (score - maximum) * v / total
                                                                              lse = (maximum + log2(total)) * ln(2)

    rows of the tile --> queries ---+
    strip --> positions --> keys ---+--> scores --> online softmax --> weights --+
                       +--> values ----------------------------------------------+--> sums --> out
                       +--> biases (of multiplicity, and -inf for none)

One program computes one tile for one element of the batch. It goes over the strips of keys that all its rows see, then over those
that a bound cuts: query i sees the keys from `i - back` to `i + ahead`. Later groups of branches start from what earlier ones
have left in `out` and `lse`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dilkit.backends.triton.scores import LN2, LOG2E
from dilkit.backends.triton.tiles import (
    by_row,
    load_rows,
    scored_keys,
    span_at,
    store_rows,
    tile_at,
    turns,
)


@triton.jit
def attend(
    maximum, total, sums, queries, rows, key, value, flags, table, lowered, span, batch, head, kv_head, base, back, ahead, scale2,
    CUT: tl.constexpr, MASKED: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, SOFTCAP: tl.constexpr, METRIC: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Add strips of a span to the online softmax: those that a bound cuts if `CUT`, else those that all rows see whole."""
    first, end = turns(span, CUT)
    for turn in range(first, end):
        _, scores, _, positions, there = scored_keys(
            queries, rows, key, flags, table, lowered, span, turn, batch, head, kv_head, base, back, ahead, scale2,
            CUT, MASKED, DIM, SIZE, COLUMNS, PRECISION, SOFTCAP, METRIC, DIMS,
        )  # fmt: skip
        highest = tl.maximum(maximum, tl.max(scores, 1))
        finite = tl.where(highest == -float("inf"), 0.0, highest)
        weights = tl.exp2(scores - finite[:, None])
        rescale = tl.exp2(maximum - finite)
        total = total * rescale + tl.sum(weights, 1)
        values = load_rows(value, batch, kv_head, positions, there, DIM, SIZE)
        sums = tl.dot(weights.to(values.dtype), values, sums * rescale[:, None], input_precision=PRECISION)
        maximum = highest
    return maximum, total, sums


@triton.jit(do_not_specialize=["mask", "batches", "seq", "heads", "group", "back", "ahead"])
def forward(
    query, key, value, out, lse, mask, table, lowered, batches, seq, heads, group, back, ahead, scale2,
    FIRST: tl.constexpr, BOUNDED: tl.constexpr, MASKED: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr, METRIC: tl.constexpr,
    DIMS: tl.constexpr,
):  # fmt: skip
    """Write `out` and `lse`. `group`: query heads that share a key/value head. `FIRST`: no earlier group has written."""
    tile, batch = tl.program_id(0) // batches, tl.program_id(0) % batches
    rows, there, head, base = tile_at(table, tile, ROWS)
    sums_at = by_row(lse, batch, head, heads, seq) + rows
    queries = load_rows(query, batch, head, rows, there, DIM, SIZE)
    if FIRST:
        maximum = tl.full([ROWS], -float("inf"), tl.float32)
        sums = tl.zeros([ROWS, SIZE], tl.float32)
    else:
        maximum = tl.load(sums_at, mask=there, other=-float("inf")) * LOG2E
        sums = load_rows(out, batch, head, rows, there, DIM, SIZE).to(tl.float32)
    total = tl.where(maximum == -float("inf"), 0.0, 1.0)
    span, flags = span_at(table, tile), mask + batch.to(tl.int64) * seq
    kv_head = head // group
    maximum, total, sums = attend(
        maximum, total, sums, queries, rows, key, value, flags, table, lowered, span, batch, head, kv_head, base, back, ahead,
        scale2, False, MASKED, DIM, SIZE, COLUMNS, PRECISION, SOFTCAP, METRIC, DIMS,
    )  # fmt: skip
    if BOUNDED:
        maximum, total, sums = attend(
            maximum, total, sums, queries, rows, key, value, flags, table, lowered, span, batch, head, kv_head, base, back, ahead,
            scale2, True, MASKED, DIM, SIZE, COLUMNS, PRECISION, SOFTCAP, METRIC, DIMS,
        )  # fmt: skip
    seen = total > 0
    whole = tl.where(seen, total, 1.0)
    if not FIRST:
        tl.debug_barrier()  # several warps may hold the lse of a row: none is written before all have read
    tl.store(sums_at, tl.where(seen, (maximum + tl.log2(whole)) * LN2, -float("inf")), mask=there)
    store_rows(out, batch, head, rows, there, sums / whole[:, None], False, DIM, SIZE)
