"""Rows and columns of a tile: device functions that find where they are, and what their scores need, a thread for each."""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import cuda

from dilkit.backends.numba.compiling import LARGE_LSE, LOG2E, LSE_ROUNDING, NEG_INF, ZERO, device
from dilkit.backends.numba.tiles import rows_of, tile_of
from dilkit.backends.numba.visible import list_visible, masked, visible_position
from dilkit.backends.tiles.schedule import MAX_SEQ


class KeyValue(NamedTuple):
    """Something of the keys, and the same of the values: their rows, their tiles, the sums of their gradients."""

    keys: Any
    values: Any


@device
def query_tile(memory, sizes, options, group, thread):
    """The query tile of this block, with the positions of its rows and of the keys that they see looked up."""
    tile = tile_of(cuda.blockIdx.x, group, sizes.batch)
    find_rows(memory, tile, thread)
    find_keys(memory, tile, group, sizes.seq, options.causal, thread)
    return tile


@device
def key_value_rows(key, value, tile, sizes):
    """The rows of keys and values of the head that the query tile's own shares."""
    head = tile.head // (sizes.heads // sizes.kv_heads)
    return KeyValue(rows_of(key, tile, head, sizes), rows_of(value, tile, head, sizes))


@device
def find_rows(memory, tile, thread):
    """Write the positions of the tile's rows; -1 beyond the last."""
    if thread.number < memory.rows.shape[0]:
        memory.rows[thread.number] = tile.row + thread.number * tile.step if thread.number < tile.rows else -1


@device
def find_keys(memory, tile, group, seq, causal, thread):
    """The keys that the rows of a query tile see."""
    if thread.number == 0:
        highest = tile.row + (tile.rows - 1) * tile.step + 1 if causal else seq
        list_visible(memory.visible, group.branches, tile.branches, tile.row, seq, 0, highest)


@device
def find_queries(memory, tile, chosen, group, seq, causal, thread):
    """The queries that see the rows of a key tile through the branches of the bit set `chosen`."""
    if thread.number == 0:
        list_visible(memory.visible, group.branches, chosen, tile.row, seq, tile.row if causal else 0, seq)


@device
def look_up_keys(memory, window, tile, group, mask, once, thread):
    """The visible keys from number `window` on, as columns."""
    index, count = window + thread.number, group.branches.shape[0]
    position, bias = visible_position(memory.visible, index, count, tile.branches, tile.row, once)
    memory.columns.positions[thread.number] = position
    memory.columns.biases[thread.number] = NEG_INF if masked(mask, tile.batch, max(position, 0)) else bias


@device
def lowered(lse):
    """A large lse, less by what rounding made of it and of the scores.

    The key that a row sees almost alone then has a weight of 1, not of 2 to a rounding error."""
    return lse - LSE_ROUNDING * abs(lse) if abs(lse) > LARGE_LSE else lse


@device
def look_up_queries(memory, window, tile, head, chosen, group, lse, delta, once, thread):
    """The visible queries of `head` from number `window` on, as columns. One that sees nothing has no gradient."""
    index, count = window + thread.number, group.branches.shape[0]
    position, bias = visible_position(memory.visible, index, count, chosen, tile.row, once)
    total = lowered(lse[tile.batch, head, max(position, 0)])
    seen = position >= 0 and total > NEG_INF
    memory.columns.positions[thread.number] = position
    memory.columns.biases[thread.number] = bias - total * LOG2E if seen else NEG_INF
    memory.columns.deltas[thread.number] = delta[tile.batch, head, position] if seen else ZERO


@device
def start_query_terms(terms, lse, delta, memory, tile, causal, thread):
    """Load the terms of the scores and gradients of a query tile's rows."""
    for i in range(terms.limits.shape[0]):
        position = memory.rows[thread.y + i * thread.down]
        total = lowered(lse[tile.batch, tile.head, max(position, 0)])
        seen = position >= 0 and total > NEG_INF
        terms.biases[i] = -total * LOG2E if seen else NEG_INF
        terms.deltas[i] = delta[tile.batch, tile.head, position] if seen else ZERO
        terms.limits[i] = position if causal else MAX_SEQ


@device
def start_key_terms(terms, mask, memory, tile, causal, thread):
    """Load the terms of the scores of a key tile's rows."""
    for i in range(terms.limits.shape[0]):
        position = memory.rows[thread.y + i * thread.down]
        terms.biases[i] = NEG_INF if masked(mask, tile.batch, max(position, 0)) else ZERO
        terms.limits[i] = position if causal else -1
