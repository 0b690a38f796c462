"""Device functions shared by the kernels in Triton: a tile's place, its strips, rows of a tensor, scores.

    tile     rows (positions) = row + step * (0 .. rows - 1), of one head: the rows of one softmax
    strip    positions = base + first + step * (0 .. count - 1), of what the tile sees: the columns of one step of the loop
    span     strips from .. to, of which all rows see those in the middle as a whole; before and after it, a bound cuts them
    scores   [row, column] = capped(rows . columns) + bias[column], -inf beyond the bounds row - back .. row + ahead; and what
             `scores` adds for a row and a column, if a call has a bias

`dilkit.backends.triton.tables` makes tiles and strips on the host; a strip's biases are log2 of how often each column counts. All
scores are to the base 2.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dilkit.backends.triton.scores import LOG2E, biased, capped_scores

EPSILON: tl.constexpr = tl.constexpr(2.0**-23)
LARGE_LSE: tl.constexpr = tl.constexpr(8192.0)
"""Beyond it, the rounding of an lse changes weights by 1/512 or more."""


class View(NamedTuple):
    """A tensor `(batch, seq, heads, head_dim)`, and the strides of all axes but the last, whose stride is 1."""

    data: Tensor
    batch: int
    row: int
    head: int


class TableView(NamedTuple):
    """The tables of one launch, as `tables.Tables` defines them."""

    tiles: Tensor
    spans: Tensor
    strips: Tensor
    biases: Tensor


@triton.jit
def tile_at(table, number, ROWS: tl.constexpr):
    """Return the positions of a tile's rows, which of them exist, its head, and the base of its strips' positions."""
    record = table.tiles + number * 5
    row, rows, step, head = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    i = tl.arange(0, ROWS)
    there = i < rows
    return tl.where(there, row + i * step, row), there, head, tl.load(record + 4)


@triton.jit
def span_at(table, number):
    """Return the strips that a tile, or one of its query heads, sees: first, first whole, end of the whole ones, end."""
    record = table.spans + number * 4
    return tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)


@triton.jit
def turns(span, CUT: tl.constexpr):
    """Return the first and the end turn of the loop over a span's strips: the cut ones if `CUT`, else the whole ones."""
    if CUT:
        return span[0], span[3] - (span[2] - span[1])
    return span[1], span[2]


@triton.jit
def strip_of_turn(span, turn, CUT: tl.constexpr):
    """Return the strip of a turn: strips that are cut lie before or after the whole ones."""
    return turn + tl.where(turn < span[1], 0, span[2] - span[1]) if CUT else turn


@triton.jit
def strip_at(table, number, base, COLUMNS: tl.constexpr):
    """Return the positions of a strip's columns, which of them exist, and their biases, -inf where none does."""
    record = table.strips + number * 4
    first, step, count, bias = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    i = tl.arange(0, COLUMNS)
    there = i < count
    positions = tl.where(there, base + first + i * step, base + first)
    return positions, there, tl.load(table.biases + bias + i, mask=there, other=-float("inf"))


@triton.jit
def within(scores, rows, positions, back, ahead):
    """Set scores of positions beyond the bounds of their row to `-inf`."""
    apart = positions[None, :] - rows[:, None]
    return tl.where((apart >= -back) & (apart <= ahead), scores, -float("inf"))


@triton.jit
def addresses(view, batch, head, positions, SIZE: tl.constexpr):
    """Return the addresses of one head's rows at `positions`."""
    start = view.data + batch.to(tl.int64) * view.batch + head.to(tl.int64) * view.head
    return start + positions.to(tl.int64)[:, None] * view.row + tl.arange(0, SIZE)[None, :]


@triton.jit
def inside(there, DIM: tl.constexpr, SIZE: tl.constexpr):
    """Return a mask of the numbers of rows that are padded from `DIM` to `SIZE`."""
    columns = tl.arange(0, SIZE)[None, :]
    return there[:, None] & (columns < DIM)


@triton.jit
def load_rows(view, batch, head, positions, there, DIM: tl.constexpr, SIZE: tl.constexpr):
    """Load the rows of one head at `positions`, and zeros where there is none."""
    return tl.load(addresses(view, batch, head, positions, SIZE), mask=inside(there, DIM, SIZE), other=0.0)


@triton.jit
def store_rows(view, batch, head, positions, there, sums, add: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr):
    """Write `sums` to the rows of one head at `positions`, or add them to what is there."""
    places, real = addresses(view, batch, head, positions, SIZE), inside(there, DIM, SIZE)
    if add:
        sums += tl.load(places, mask=real, other=0.0).to(tl.float32)
    tl.store(places, sums.to(view.data.dtype.element_ty), mask=real)


@triton.jit
def not_ignored(flags, positions, there):
    """Return a mask of keys that exist and are not ignored. `flags`: one batch element's, 1 = ignored."""
    return there & (tl.load(flags + positions, mask=there, other=1) == 0)


@triton.jit
def scored_keys(
    queries, rows, key, flags, table, lowered, span, turn, batch, head, kv_head, base, back, ahead, scale2,
    CUT: tl.constexpr, MASKED: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, SOFTCAP: tl.constexpr, METRIC: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Load the keys of the strip of a turn; score them, with and without biases; find their positions and which exist."""
    positions, there, bias = strip_at(table, strip_of_turn(span, turn, CUT), base, COLUMNS)
    if MASKED:
        there = not_ignored(flags, positions, there)
        bias = tl.where(there, bias, -float("inf"))
    keys = load_rows(key, batch, kv_head, positions, there, DIM, SIZE)
    capped = capped_scores(tl.dot(queries, keys.T, input_precision=PRECISION), scale2, SOFTCAP)
    scores = biased(capped + bias[None, :], lowered, batch, head, rows, positions, 1, METRIC, DIMS)
    if CUT:
        scores = within(scores, rows, positions, back, ahead)
    return keys, scores, capped, positions, there


@triton.jit
def by_row(numbers, batch, head, heads, seq):
    """Return the address of one head's numbers in `lse` or `delta`, `(batch, heads, seq)`."""
    return numbers + (batch.to(tl.int64) * heads + head) * seq


@triton.jit
def load_sums(lse, delta, batch, head, heads, seq, positions, there):
    """Load `lse` of the queries at `positions`, to the base 2 and inf where nothing is seen, and delta.

    A large lse is less by what rounding made of it and of the scores. The key that a row sees almost alone then has a weight
    of 1, not of 2 to a rounding error.
    """
    sums = tl.load(by_row(lse, batch, head, heads, seq) + positions, mask=there, other=-float("inf"))
    sums = tl.where(tl.abs(sums) > LARGE_LSE, sums - 3 * EPSILON * tl.abs(sums), sums)
    deltas = tl.load(by_row(delta, batch, head, heads, seq) + positions, mask=there, other=0.0)
    return tl.where(sums == -float("inf"), float("inf"), sums * LOG2E), deltas
