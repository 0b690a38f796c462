"""Blocks of rows and columns that hold some visible pair, or only visible pairs; found without listing pairs.

some   at least all blocks that hold a pair: others are passed over
whole  of these only such as hold pairs alone: in them the pairs need not be asked for
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dilkit.pattern.lowering import Band, Form, Given, Global, Grid, Runs, Segments

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]

BLOCK = 128


class BlockGrid(NamedTuple):
    """Pairs of a query block and a key block, as broadcastable arrays of their residue classes and first places.

    All tokens of a block have one residue modulo `rate`.

    Token t of residue class c has the position `t * rate + c`; `places` is a multiple of `block`.
    """

    rate: int
    places: int
    block: int
    query_class: Ints
    query_place: Ints
    key_class: Ints
    key_place: Ints


def blocks_of(forms: Sequence[Form], seq: int, heads: int, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return which blocks hold some visible pair and which hold visible pairs alone, both bool `(heads, blocks, blocks)`.

    `seq`: a multiple of `BLOCK`.
    """
    count = seq // BLOCK
    some, whole = (np.zeros((heads, count, count), np.bool_) for _ in range(2))
    first, residue = np.arange(count) * BLOCK, np.zeros(1, np.int64)
    grid = BlockGrid(1, seq, BLOCK, residue, first[:, None], residue, first)
    for form in forms:
        if isinstance(form, Given):  # `given_blocks` adds what each call says
            continue
        own_some, own_whole = _of_form(form, grid)
        served = slice(*form.heads)
        some[served] |= own_some
        if not form.without and form.without_rows is None and form.without_columns is None:
            whole[served] |= own_whole
    if is_causal:
        some, whole = np.tril(some), np.tril(whole, -1)
    return torch.from_numpy(some), torch.from_numpy(whole)


def ended(some: Tensor, whole: Tensor, rows: int, keys: int | None = None) -> tuple[Tensor, Tensor]:
    """Drop blocks beyond these rows and keys; blocks that reach beyond them count as partial."""
    row, column = (torch.arange(size, device=some.device) for size in some.shape[-2:])
    keys = rows if keys is None else keys
    begun = (row < math.ceil(rows / BLOCK))[:, None] & (column < math.ceil(keys / BLOCK))
    return some & begun, whole & (row < rows // BLOCK)[:, None] & (column < keys // BLOCK)


def of_queries(some: Tensor, whole: Tensor, offset: int, rows: int, keys: int) -> tuple[Tensor, Tensor]:
    """Cut out the blocks of so many rows and keys, multiples of `BLOCK`, whose first query has the position `offset`."""
    first = torch.arange(offset, offset + rows, BLOCK, device=some.device)
    above, below = ((x // BLOCK).clamp(max=some.shape[-2] - 1) for x in (first, first + BLOCK - 1))
    columns = slice(0, keys // BLOCK)
    return (some[:, above] | some[:, below])[..., columns], (whole[:, above] & whole[:, below])[..., columns]


def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of set blocks of each row, and the columns sorted with set ones first: int32."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _of_form(form: Form, grid: BlockGrid) -> tuple[Bools, Bools]:
    if isinstance(form, Runs):
        return _of_runs(form, grid.places // BLOCK)
    if isinstance(form, (Segments, Band, Global)):
        return shown(form, 0, grid, grid.places)
    assert isinstance(form, Grid)
    rest = int(np.prod(form.shape[1:]))
    # A window is moved back, if at all, by less than its own length.
    reach = ((form.kernel[0] - 1) * form.dilation[0] + 1) * rest - 1
    ahead = rest - 1 if form.axes[0].causal else reach
    some, _ = shown(Band(heads=form.heads, back=reach, ahead=ahead), 0, grid, grid.places)
    return some, np.zeros_like(some)


def shown(form: Segments | Band | Global, offset: int, grid: BlockGrid, seq: int) -> tuple[Bools, Bools]:
    """Return where a form shows some pair of two blocks, and where all, for heads of one offset and `seq` tokens."""
    query, key, last, rate = grid.query_place, grid.key_place, grid.block - 1, grid.rate
    if isinstance(form, Global):
        return _of_global(form, grid)
    apart, is_exact = grid.query_class - grid.key_class, rate % form.rate == 0  # blocks of some residue class of the form
    if isinstance(form, Segments):
        length = grid.places if form.length >= seq else form.length // rate
        same_class = (grid.query_class % form.rate == offset) & (grid.key_class % form.rate == offset) | (not is_exact)
        low, high, key_low, key_high = (x // length for x in (query, query + last, key, key + last))
        some = same_class & (low <= key_high) & (key_low <= high)
        return some, some & (low == high) & (key_low == key_high) & is_exact
    nearest, farthest = ((query + x - key) * rate + apart for x in (-last, last))  # of i - j
    like = (apart % form.rate == 0) | (not is_exact)
    whole = (farthest <= form.back) & (nearest >= -form.ahead) & is_exact & (form.first == 0)
    return like & (nearest <= form.back) & (farthest >= -form.ahead), like & whole


def _of_global(form: Global, grid: BlockGrid) -> tuple[Bools, Bools]:
    shape = grid.rate, grid.places // grid.block
    rows, columns = (
        among(runs, grid.rate * grid.places).reshape(grid.places, grid.rate).T.reshape(*shape, grid.block).sum(2)
        for runs in (form.rows, form.columns)
    )
    rows = rows[grid.query_class, grid.query_place // grid.block]
    columns = columns[grid.key_class, np.minimum(grid.key_place // grid.block, shape[1] - 1)]
    return (rows > 0) | (columns > 0), (rows == grid.block) | (columns == grid.block)


def among(runs: NDArray[np.int64], seq: int) -> Bools:
    change = np.zeros(seq + 1, np.int64)
    for bounds, step in ((runs[:, 0], 1), (runs[:, 1], -1)):
        np.add.at(change, np.minimum(bounds, seq), step)
    inside: Bools = change.cumsum()[:-1] > 0
    return inside


def _of_runs(form: Runs, count: int) -> tuple[Bools, Bools]:
    table, seq = form.queries, count * BLOCK
    start = np.concatenate(([0], table.stop[:-1]))
    run = np.repeat(np.arange(len(table.runs)), table.runs)
    top, bottom = start[run], np.minimum(table.stop[run], seq)
    left, right = table.columns[:, 0], np.minimum(table.columns[:, 1], seq)
    there = (top < bottom) & (left < right)
    top, bottom, left, right = (x[there] for x in (top, bottom, left, right))
    some = _rectangles(top // BLOCK, (bottom - 1) // BLOCK + 1, left // BLOCK, (right - 1) // BLOCK + 1, count)
    return some, _rectangles(-(-top // BLOCK), bottom // BLOCK, -(-left // BLOCK), right // BLOCK, count)


def _rectangles(
    top: NDArray[np.int64], bottom: NDArray[np.int64], left: NDArray[np.int64], right: NDArray[np.int64], count: int
) -> Bools:
    """Return the cells of rectangles, given first and end row and column of each; empty ones are skipped."""
    marks = np.zeros((count + 1, count + 1), np.int64)
    there = (top < bottom) & (left < right)
    for rows, sign in ((top[there], 1), (bottom[there], -1)):
        np.add.at(marks, (rows, left[there]), sign)
        np.add.at(marks, (rows, right[there]), -sign)
    cells: Bools = marks.cumsum(0).cumsum(1)[:-1, :-1] > 0
    return cells
