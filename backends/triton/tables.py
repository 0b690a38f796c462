"""What the kernels in Triton are told of a group of branches, worked out on the host: what each tile sees, strip by strip.

    list of strips     all positions that the rows of a tile see, relative to its base; shared by all tiles that see the same
    strip              positions first, first + step, ..., at most as many as a kernel's score tile has columns, and their biases
    biases             log2 of how many branches show a position, 0 if each counts once, -inf if another strip shows it too

Between two ends of segments the same branches reach the tile. There a branch is listed unless the rate of another one divides
its own, which then shows all its positions; a position that two listed branches show is shown by the first. How often a position
counts depends on its distance from the row modulo the rates: so a period of biases serves all strips of a branch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

from dilkit.backends.tiles.device import KEYS
from dilkit.backends.tiles.schedule import Group
from dilkit.problem import Problem

Ints = NDArray[np.int64]
MOST_BYTES = 2**30
"""Of the tables of a group, at most."""
_LIST = 2**33
"""Positions of different lists are so far apart where they are sorted together."""


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables of one launch.

    `tiles`, int32 `(tiles, 5)`: first row, how many rows, their distance, head, and `base`, which strips are relative to.
    `spans`, int32 `(tiles * heads, 4)`: of each tile, for each of the query heads that a tile of keys has, the strips from `[0]`
    and below `[1]`, which every row sees as a whole, and from `[2]` and below `[3]`, which causality cuts.
    `strips`, int32 `(strips, 4)`: first position, step, count, and where its biases begin in `biases`, float32.
    """

    tiles: NDArray[np.int32]
    spans: NDArray[np.int32]
    strips: NDArray[np.int32]
    biases: NDArray[np.float32]


def make_tables(problem: Problem, group: Group, kind: str, columns: int) -> Tables:
    """The tables of the tiles of `group` that `kind` names, in strips of at most `columns` positions.

    Raises ValueError where they would need more than `MOST_BYTES`.
    """
    tiles, of_keys = getattr(group, kind), kind == KEYS
    per_head = problem.heads // problem.kv_heads if of_keys else 1
    first, steps = tiles["row"].astype(np.int64), tiles["step"].astype(np.int64)
    rows, sets = np.repeat(first, per_head), _sets(group, tiles, per_head)
    bases = np.repeat(_bases(group, tiles), per_head)
    lists, of_tile = _distinct(group, rows, sets, bases, problem.seq)
    strips, biases = _strips(group, lists, problem.pattern.overlap == "once", columns)
    last_rows = np.repeat(first + (tiles["rows"].astype(np.int64) - 1) * steps, per_head)
    where = of_tile, rows - bases, last_rows - bases
    spans = _spans(strips, len(lists.rows), *where, of_keys, problem.is_causal)
    table = np.stack([first, tiles["rows"], steps, tiles["head"], bases[::per_head]], 1)
    return Tables(table.astype(np.int32), spans.astype(np.int32), strips[:, 1:].astype(np.int32), biases)


@dataclass(frozen=True, eq=False)
class _Lists:
    """Of each list, relative to its base: a row that sees it, the set of branches, and where their segments begin and end."""

    rows: Ints
    sets: Ints
    starts: Ints
    stops: Ints


def _sets(group: Group, tiles: NDArray[np.void], per_head: int) -> Ints:
    """Of each tile and query head, the branches that serve both, as bits."""
    heads = tiles["head"].astype(np.int64)[:, None] * per_head + np.arange(per_head)
    serving = np.zeros_like(heads)
    for b, branch in enumerate(group.branches):
        serving |= ((branch["head_start"] <= heads) & (heads < branch["head_stop"])).astype(np.int64) << b
    return (tiles["set"].astype(np.int64)[:, None] & serving).ravel()


def _bases(group: Group, tiles: NDArray[np.void]) -> Ints:
    """Where the longest segment that each tile is in begins: equal tiles of other segments then see equal lists."""
    bases = tiles["row"].astype(np.int64)
    for b, branch in enumerate(group.branches):  # shortest segment first
        inside = tiles["set"] >> np.uint32(b) & 1 > 0
        bases = np.where(inside, tiles["row"] // branch["segment"] * branch["segment"], bases)
    return bases


def _distinct(group: Group, rows: Ints, sets: Ints, bases: Ints, seq: int) -> tuple[_Lists, Ints]:
    """The different lists, and which of them each tile sees."""
    parts = [sets]
    for b, branch in enumerate(group.branches):
        inside, segment = sets >> b & 1 > 0, int(branch["segment"])
        start = rows // segment * segment
        ends = start - bases, np.minimum(start + segment, seq) - bases, (rows - bases) % int(branch["rate"])
        parts += [np.where(inside, x, 0) for x in ends]
    found, one, of_tile = np.unique(np.stack(parts, 1), axis=0, return_index=True, return_inverse=True)
    return _Lists((rows - bases)[one], found[:, 0], found[:, 1::3], found[:, 2::3]), of_tile.reshape(-1)


def _strips(group: Group, lists: _Lists, once: bool, columns: int) -> tuple[Ints, NDArray[np.float32]]:
    """`(strips, biases)`: of each strip its list and what `Tables.strips` has, by list and first position."""
    runs = np.concatenate([np.zeros((0, 6), np.int64), *_runs(group, lists)])
    of_list, first, count, branch, active, row = runs.T
    rate = group.branches["rate"].astype(np.int64)[branch]
    bias_at, period, biases = _biases(group, branch, active, once, columns)
    phase = (first - row) // np.maximum(rate, 1)
    pieces = -(-count // columns)
    if 16 * pieces.sum() > MOST_BYTES:
        raise ValueError(f"tables of {pieces.sum()} strips need more than {MOST_BYTES} bytes; use another backend")
    run = np.repeat(np.arange(len(runs)), pieces)
    done = (np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * columns
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
    return strips[np.lexsort((strips[:, 1], strips[:, 0]))], biases


def _runs(group: Group, lists: _Lists) -> list[Ints]:
    """Runs of equally spaced positions, between two ends of segments: list, first, count, branch, active branches, row."""
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
    """The branches, as bits, of which any shows all positions of branch `b`."""
    return sum(1 << j for j, other in enumerate(rates) if rates[b] % other == 0 and (other, j) < (rates[b], b))


def _biases(group: Group, branch: Ints, active: Ints, once: bool, columns: int) -> tuple[Ints, Ints, NDArray[np.float32]]:
    """Of each run where its biases begin and their period; and all biases, `columns` beyond each period."""
    kinds, of_run = np.unique(active << 5 | branch, return_inverse=True)
    found, places, periods = [np.zeros(0, np.float32)], [], []
    for kind in kinds.tolist():
        own = _period(group, kind & 31, kind >> 5, once, columns)
        places.append(sum(map(len, found)))
        periods.append(len(own) - columns)
        found.append(own)
    at, period = (np.array(x, np.int64)[of_run] for x in (places, periods))
    return at, period, np.concatenate(found)


def _period(group: Group, branch: int, active: int, once: bool, columns: int) -> NDArray[np.float32]:
    """The biases of the positions of `branch` where the branches `active` reach, by distance from the row: a period, and
    `columns` more."""
    rates = [int(rate) for rate in group.branches["rate"]]
    own, reach = rates[branch], [b for b in range(len(rates)) if active >> b & 1]
    period = lcm(*(rates[b] for b in reach)) // own
    if 4 * period > MOST_BYTES:
        raise ValueError(f"rates {rates} repeat after {period * own} tokens, too many for tables; use another backend")
    distance = np.arange(period + columns, dtype=np.int64) * own
    count = sum((distance % rates[b] == 0).astype(np.float32) for b in reach)
    hidden = np.zeros(len(distance), bool)
    for b in reach:
        if b < branch and not active & _shown_by(rates, b):
            hidden |= distance % rates[b] == 0
    return np.where(hidden, -np.inf, 0.0 if once else np.log2(count)).astype(np.float32)


def _spans(strips: Ints, lists: int, of_tile: Ints, row: Ints, last_row: Ints, of_keys: bool, causal: bool) -> Ints:
    """`Tables.spans` of tiles from `row` to `last_row`, both relative to the base. Tiles of keys are seen by later positions."""
    begin, end = (np.searchsorted(strips[:, 0], np.arange(lists), side=side)[of_tile] for side in ("left", "right"))
    if not causal:
        return np.stack([begin, end, begin, begin], 1)
    first = strips[:, 0] * _LIST + strips[:, 1]
    last = np.maximum.accumulate(first + (strips[:, 3] - 1) * strips[:, 2]) if len(strips) else first
    near, far = of_tile * _LIST + row, of_tile * _LIST + last_row
    if of_keys:
        whole, cut = (np.clip(np.searchsorted(x, at), begin, end) for x, at in ((first, far), (last, near)))
        return np.stack([whole, end, cut, whole], 1)
    whole, cut = (np.clip(np.searchsorted(x, at, side="right"), begin, end) for x, at in ((last, near), (first, far)))
    return np.stack([begin, whole, whole, cut], 1)
