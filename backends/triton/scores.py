"""Softcap and bias of the products of queries and keys, in Triton; all scores are to the base 2.

    capped    products times scale2, or with a SOFTCAP softcap2 * tanh(products * scale2 / softcap2)
    biases    METRIC "table": the entry of the difference of two points, clipped to the table; else -slope * distance by METRIC,
              "euclidean", "l1" or "max"; "": none
    points    of DIMS numbers, read from `positions`; with DIMS 0 the number of a row

`scale2 = scale * log2(e)`, `softcap2 = SOFTCAP * log2(e)`. A SOFTCAP of 0 is none. Without a bias its view is None.

The gradient of slopes and tables: each program of `dquery` adds its tile's terms to its own line of `sums`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dilkit.backends.triton.products import rounded

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


class BiasView(NamedTuple):
    """A lowered bias: `weights` `(heads, entries)`, and `positions` of elements of the batch `apart` numbers apart.

    `sums`: `(programs, entries)`. What a bias does not have is any tensor. `sizes` of a table, 1 for dimensions that it lacks.
    """

    weights: Tensor
    positions: Tensor
    sums: Tensor
    apart: int
    entries: int
    sizes: tuple[int, int, int]


@triton.jit
def tanh(x):
    """tanh(x), of which small values keep their relative precision, and NaN stays NaN."""
    size = tl.abs(x)
    size = tl.where(size > 16.0, 16.0, size)  # from 10 on it is 1 in fp32
    square = size * size
    small = size * (945.0 + square * (105.0 + square)) / (945.0 + square * (420.0 + square * 15.0))
    large = 1.0 - 2.0 / (tl.exp2(size * (2.0 * LOG2E)) + 1.0)
    magnitude = tl.where(size < 0.6, small, large)  # a continued fraction, exact to 1e-9 below 0.6
    return tl.where(x < 0.0, -magnitude, magnitude)


@triton.jit
def capped_scores(products, scale2, SOFTCAP: tl.constexpr):
    """Return scores from dot products of rows: scaled, and capped if there is a SOFTCAP."""
    scores = products * scale2
    if SOFTCAP > 0.0:
        scores = tanh(products * (scale2 / (SOFTCAP * LOG2E))) * (SOFTCAP * LOG2E)
    return scores


@triton.jit
def below_cap(products, capped, SOFTCAP: tl.constexpr):
    """Return the gradients of scores before the softcap, from those of the `capped` scores."""
    if SOFTCAP > 0.0:
        share = capped * (1.0 / (SOFTCAP * LOG2E))
        products *= 1.0 - share * share
    return products


@triton.jit
def apart(bias, batch, rows, columns, d: tl.constexpr, DIMS: tl.constexpr):
    """Return the difference of the points of rows and columns along dimension `d`."""
    if DIMS == 0:
        return (rows[:, None] - columns[None, :]).to(tl.float32)
    own = bias.positions + batch.to(tl.int64) * bias.apart + d
    left, right = tl.load(own + rows.to(tl.int64) * DIMS), tl.load(own + columns.to(tl.int64) * DIMS)
    return left[:, None] - right[None, :]


@triton.jit
def distances(bias, batch, rows, columns, METRIC: tl.constexpr, DIMS: tl.constexpr):
    """Return the distances between the points of rows and columns."""
    sums = tl.abs(apart(bias, batch, rows, columns, 0, DIMS))
    if DIMS > 1:
        if METRIC == "euclidean":
            sums *= sums
        for d in tl.static_range(1, DIMS):
            further = tl.abs(apart(bias, batch, rows, columns, d, DIMS))
            if METRIC == "euclidean":
                sums += further * further
            elif METRIC == "l1":
                sums += further
            else:
                sums = tl.maximum(sums, further)
        if METRIC == "euclidean":
            sums = tl.sqrt(sums)
    return sums


@triton.jit
def entry_along(bias, batch, rows, columns, d: tl.constexpr, SIGN: tl.constexpr, DIMS: tl.constexpr):
    """Return the table's index along dimension `d` for the differences of rows from columns, or reversed with SIGN -1."""
    most = bias.sizes[d] // 2 * 1.0
    difference = apart(bias, batch, rows, columns, d, DIMS) * SIGN
    return (tl.minimum(tl.maximum(difference, -most), most) + most).to(tl.int32)


@triton.jit
def table_entries(bias, batch, rows, columns, SIGN: tl.constexpr, DIMS: tl.constexpr):
    """Return which entry of the bias table each pair of row and column takes."""
    entries = entry_along(bias, batch, rows, columns, 0, SIGN, DIMS)
    for d in tl.static_range(1, DIMS):
        entries = entries * bias.sizes[d] + entry_along(bias, batch, rows, columns, d, SIGN, DIMS)
    return entries


@triton.jit
def at_most_zero(exponents):
    """Clip exponents of weights to at most 0; NaN stays NaN."""
    return tl.minimum(exponents, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def biased(scores, bias, batch, head, rows, columns, SIGN: tl.constexpr, METRIC: tl.constexpr, DIMS: tl.constexpr):
    """Add the bias of a query head to scores. SIGN is 1 where rows are queries, -1 where they are keys."""
    if METRIC == "table":
        entries = table_entries(bias, batch, rows, columns, SIGN, DIMS)
        scores += tl.load(bias.weights + head.to(tl.int64) * bias.entries + entries) * LOG2E
    elif METRIC != "":
        slope = tl.load(bias.weights + head) * LOG2E
        scores -= slope * distances(bias, batch, rows, columns, METRIC, DIMS)
    return scores


@triton.jit
def learn(gradients, bias, program, batch, rows, columns, METRIC: tl.constexpr, DIMS: tl.constexpr):
    """Add what the gradients of scores of queries (rows) and keys say of the weights to the sums of this program.

    They are nobody else's, so that their order, and with it their bits, are the same at each call.
    """
    sums = bias.sums + program.to(tl.int64) * bias.entries
    if METRIC == "table":
        entries = table_entries(bias, batch, rows, columns, 1, DIMS)
        for entry in range(tl.min(entries), tl.max(entries) + 1):
            tl.atomic_add(sums + entry, tl.sum(tl.where(entries == entry, gradients, 0.0)), sem="relaxed")
    else:
        products = rounded(distances(bias, batch, rows, columns, METRIC, DIMS), gradients)
        tl.atomic_add(sums, -tl.sum(products), sem="relaxed")
