"""Strips of segments: one list for all tiles whose rows have the same place in the same segments.

Between two ends of segments the same branches reach the tile. There a branch is listed unless the rate of another one divides
its own, which then shows all its positions; a position that two listed branches show is shown by the first. How often a position
counts depends on its distance from the row modulo the rates: so a period of biases serves all strips of a branch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

from dilkit.backends.tiles.schedule import Group
from dilkit.backends.triton import strips
from dilkit.backends.triton.strips import Ints, Strips, cut, in_order
from dilkit.problem import Problem

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Odd, of bits that look random: 2**64 over the golden ratio."""


def strips_of_segments(problem: Problem, group: Group, tiles: NDArray[np.void], per_head: int, columns: int) -> Strips:
    """Return the strips of these tiles of `group`, each tile for `per_head` query heads."""
    sets, bases = _sets(group, tiles, per_head), _bases(group, tiles)
    rows, of_rows = (np.repeat(x, per_head) for x in (tiles["row"].astype(np.int64), bases))
    lists, of_tile = _distinct(group, rows, sets, of_rows, problem.seq)
    strips, biases = _strips(group, lists, problem.pattern.overlap == "once", columns)
    return Strips(strips, biases, of_tile, bases)


@dataclass(frozen=True, eq=False)
class _Lists:
    """Lists of strips, each relative to its base: a row that sees it, its set of branches, ends of their segments."""

    rows: Ints
    sets: Ints
    starts: Ints
    stops: Ints


def _sets(group: Group, tiles: NDArray[np.void], per_head: int) -> Ints:
    """Return the branches that serve each pair of tile and query head, as bits."""
    heads = tiles["head"].astype(np.int64)[:, None] * per_head + np.arange(per_head)
    serving = np.zeros_like(heads)
    for b, branch in enumerate(group.branches):
        serving |= ((branch["head_start"] <= heads) & (heads < branch["head_stop"])).astype(np.int64) << b
    return (tiles["set"].astype(np.int64)[:, None] & serving).ravel()


def _bases(group: Group, tiles: NDArray[np.void]) -> Ints:
    """Return the start of each tile's longest segment, so that equal tiles of different segments share lists."""
    bases = tiles["row"].astype(np.int64)
    for b, branch in enumerate(group.branches):  # shortest segment first
        inside = tiles["set"] >> np.uint32(b) & 1 > 0
        bases = np.where(inside, tiles["row"] // branch["segment"] * branch["segment"], bases)
    return bases


def _distinct(group: Group, rows: Ints, sets: Ints, bases: Ints, seq: int) -> tuple[_Lists, Ints]:
    """Return the distinct lists of strips, and the number of the list that each tile sees."""
    parts = [sets]
    for b, branch in enumerate(group.branches):
        inside, segment = sets >> b & 1 > 0, int(branch["segment"])
        start = rows // segment * segment
        ends = start - bases, np.minimum(start + segment, seq) - bases, (rows - bases) % int(branch["rate"])
        parts += [np.where(inside, x, 0) for x in ends]
    one, of_tile = _different(parts)
    starts, stops = (np.stack([x[one] for x in parts[first::3]], 1) for first in (1, 2))
    return _Lists((rows - bases)[one], sets[one], starts, stops), of_tile


def _different(columns: list[Ints]) -> tuple[Ints, Ints]:
    """Return the indices of the distinct rows of a table given by columns, and for each row the number of its equal.

    Sorted by a hash, for to sort whole rows takes many times as long; where two rows have the same one, by all columns.
    """
    key = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        key = (key ^ column.astype(np.uint64)) * _FACTOR
        key ^= key >> np.uint64(29)
    _, one, of_row = np.unique(key, return_index=True, return_inverse=True)
    if not all(np.array_equal(column[one][of_row], column) for column in columns):
        _, one, of_row = np.unique(np.stack(columns, 1), axis=0, return_index=True, return_inverse=True)
    return one, of_row.reshape(-1)


def _strips(group: Group, lists: _Lists, once: bool, columns: int) -> tuple[Ints, NDArray[np.float32]]:
    """Return `(strips, biases)`: for each strip its list, then the columns of `Tables.strips`; by list and first position."""
    runs = np.concatenate([np.zeros((0, 6), np.int64), *_runs(group, lists)])
    of_list, first, count, branch, active, row = runs.T
    rate = group.branches["rate"].astype(np.int64)[branch]
    bias_at, period, biases = _biases(group, branch, active, once, columns)
    phase = (first - row) // np.maximum(rate, 1)
    run, done = cut(count, columns)
    strips = np.stack(
        [
            of_list[run],
            first[run] + done * rate[run],
            rate[run],
            np.minimum(count[run] - done, columns),
            bias_at[run] + (phase[run] + done) % period[run],
        ],
        1,
    )
    return in_order(strips), biases


def _runs(group: Group, lists: _Lists) -> list[Ints]:
    """Return runs of equally spaced positions between two ends of segments: list, first, count, branch, active branches, row."""
    cuts, found = np.sort(np.concatenate([lists.starts, lists.stops], 1), axis=1), []
    rates = [int(rate) for rate in group.branches["rate"]]
    for start, stop in zip(cuts.T[:-1], cuts.T[1:], strict=True):
        active = np.zeros_like(start)
        for b in range(len(rates)):
            reaches = (lists.starts[:, b] <= start) & (stop <= lists.stops[:, b]) & (lists.sets >> b & 1 > 0)
            active |= reaches.astype(np.int64) << b
        for b, rate in enumerate(rates):
            first = start + (lists.rows - start) % rate
            listed = np.flatnonzero((active >> b & 1 > 0) & (active & _shown_by(rates, b) == 0) & (first < stop))
            count = (stop - first - 1) // rate + 1
            columns = listed, first[listed], count[listed], np.full_like(listed, b), active[listed], lists.rows[listed]
            found.append(np.stack(columns, 1))
    return found


def _shown_by(rates: list[int], b: int) -> int:
    """Return as bits the branches that show all positions of branch `b` in its place."""
    return sum(1 << j for j, other in enumerate(rates) if rates[b] % other == 0 and (other, j) < (rates[b], b))


def _biases(group: Group, branch: Ints, active: Ints, once: bool, columns: int) -> tuple[Ints, Ints, NDArray[np.float32]]:
    """Return where the biases of each run begin and their period, and the biases themselves, `columns` beyond each period."""
    kinds, of_run = np.unique(active << 5 | branch, return_inverse=True)
    tables, places, periods = [np.zeros(0, np.float32)], [], []
    for kind in kinds.tolist():
        own = _period(group, kind & 31, kind >> 5, once, columns)
        places.append(sum(map(len, tables)))
        periods.append(len(own) - columns)
        tables.append(own)
    at, period = (np.array(x, np.int64)[of_run] for x in (places, periods))
    return at, period, np.concatenate(tables)


def _period(group: Group, branch: int, active: int, once: bool, columns: int) -> NDArray[np.float32]:
    """Return the biases of positions of `branch` where `active` branches reach, by distance: a period and `columns` more."""
    rates = [int(rate) for rate in group.branches["rate"]]
    own, reach = rates[branch], [b for b in range(len(rates)) if active >> b & 1]
    period = lcm(*(rates[b] for b in reach)) // own
    if 4 * period > strips.MOST_BYTES:
        raise ValueError(f"rates {rates} repeat after {period * own} tokens, too many for tables; use another backend")
    distance = np.arange(period + columns, dtype=np.int64) * own
    count = sum((distance % rates[b] == 0).astype(np.float32) for b in reach)
    hidden = np.zeros(len(distance), bool)
    for b in reach:
        if b < branch and not active & _shown_by(rates, b):
            hidden |= distance % rates[b] == 0
    return np.where(hidden, -np.inf, 0.0 if once else np.log2(count)).astype(np.float32)
