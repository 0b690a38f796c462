"""The tables of a group of branches, worked out on the host: what each tile sees, strip by strip.

    list of strips     all positions that the rows of a tile see, relative to its base; shared by all tiles that see the same
    strip              positions first, first + step, ..., at most as many as a kernel's score tile has columns, and their biases
    biases             log2 of how many branches show a position, 0 if each counts once, -inf if another strip shows it too
    span               the strips of a list that a tile sees, between the bounds of its rows, and which of them a bound cuts

`segment_strips` lists what segments show, `relation_strips` what relations show.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilkit.backends.tiles.device import KEYS
from dilkit.backends.tiles.schedule import Group
from dilkit.backends.triton.relation_strips import strips_of_relation
from dilkit.backends.triton.segment_strips import strips_of_segments
from dilkit.backends.triton.strips import Ints, Strips
from dilkit.problem import Problem

_LIST = 2**33
"""Positions of different lists are so far apart where they are sorted together."""


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables of one launch.

    `tiles`, int32 `(tiles, 5)`: first row, how many rows, their distance, head, and `base`, which strips are relative to.
    `spans`, int32 `(tiles * heads, 4)`: of each tile, for each of the query heads that a tile of keys has, the strips from `[0]`
    and below `[3]`; every row sees those from `[1]` and below `[2]` as a whole, and a bound cuts the others.
    `strips`, int32 `(strips, 4)`: first position, step, count, and where its biases begin in `biases`, float32.
    """

    tiles: NDArray[np.int32]
    spans: NDArray[np.int32]
    strips: NDArray[np.int32]
    biases: NDArray[np.float32]


def make_tables(problem: Problem, group: Group, kind: str, columns: int) -> Tables:
    """The tables of the tiles of `group` that `kind` names, in strips of at most `columns` positions.

    Raises ValueError where they would need more than `strips.MOST_BYTES`.
    """
    tiles, of_keys = getattr(group, kind), kind == KEYS
    per_head = problem.heads // problem.kv_heads if of_keys else 1
    if group.relation:
        seen = strips_of_relation(problem, group.relation, tiles, of_keys, columns)
    else:
        seen = strips_of_segments(problem, group, tiles, per_head, columns)
    rows, steps = tiles["row"].astype(np.int64), tiles["step"].astype(np.int64)
    last = rows + (tiles["rows"].astype(np.int64) - 1) * steps
    first_row, last_row = (np.repeat(x - seen.bases, per_head) for x in (rows, last))
    bounds = (group.ahead, group.back) if of_keys else (group.back, group.ahead)
    spans = _spans(seen, first_row, last_row, *bounds)
    table = np.stack([rows, tiles["rows"], steps, tiles["head"], seen.bases], 1)
    return Tables(table.astype(np.int32), spans.astype(np.int32), seen.strips[:, 1:].astype(np.int32), seen.biases)


def _spans(seen: Strips, row: Ints, last_row: Ints, back: int, ahead: int) -> Ints:
    """`Tables.spans` of tiles from `row` to `last_row`, both relative to the base, of which row i sees i - back .. i + ahead."""
    strips, lists = seen.strips, seen.of_tile
    begin, end = (np.searchsorted(strips[:, 0], lists, side=side) for side in ("left", "right"))
    first = strips[:, 0] * _LIST + strips[:, 1]
    last = np.maximum.accumulate(first + (strips[:, 3] - 1) * strips[:, 2]) if len(strips) else first
    start, stop = lists * _LIST + row, lists * _LIST + last_row
    spans = [
        np.searchsorted(last, start - back, side="left"),
        np.searchsorted(first, stop - back, side="left"),
        np.searchsorted(last, start + ahead, side="right"),
        np.searchsorted(first, stop + ahead, side="right"),
    ]
    spans[2] = np.maximum(spans[1], spans[2])
    return np.stack([np.clip(x, begin, end) for x in spans], 1)
