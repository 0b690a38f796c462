"""Tables of a group of branches: the strips of each tile, worked out on the host and kept on the device.

    list of strips     all positions that the rows of a tile see, relative to its base; shared by all tiles that see the same
    strip              positions first, first + step, ..., at most as many as a kernel's score tile has columns, and their biases
    biases             log2 of how many branches show a position, 0 if each counts once, -inf if another strip shows it too
    span               the strips of a list that a tile sees, between the bounds of its rows, and which of them a bound cuts

`segment_strips` lists the strips of segments, `strips_of_relation` those of relations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dilkit.backends.tiles.device import KEYS
from dilkit.backends.tiles.kept import Kept, expect_room, kept
from dilkit.backends.tiles.relations import Part, Relation
from dilkit.backends.tiles.schedule import Group, schedule
from dilkit.backends.triton.segment_strips import strips_of_segments
from dilkit.backends.triton.sizes import Sizes
from dilkit.backends.triton.strips import Ints, Strips, cut, in_order
from dilkit.pattern.runs import classes
from dilkit.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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
    """Return the tables of the tiles of `group` that `kind` names, in strips of at most `columns` positions.

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
    """Return `Tables.spans` of tiles from `row` to `last_row`, relative to the base; row i sees i - back .. i + ahead."""
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


def strips_of_relation(problem: Problem, relation: Relation, tiles: NDArray[np.void], of_keys: bool, columns: int) -> Strips:
    """Return the strips of these tiles of `relation`, of queries or `of_keys`.

    There is a list for each part and residue modulo the rate, from the first token to the last. Tiles of all heads and rows share
    the lists: between the bounds of its rows each tile sees a span of one.
    """
    rate = relation.rate
    strips = _strips(relation.numbered(of_keys), rate, columns)
    number = (tiles["set"].astype(np.int64) - 1) * rate + tiles["row"] % rate  # below 0, where there is no list, without a part
    if of_keys:
        number = np.where(_serves(relation, problem, tiles), number[:, None], -1).reshape(-1)
    return Strips(in_order(strips), np.zeros(columns, np.float32), number, np.zeros(len(tiles), np.int64))


def _strips(parts: list[tuple[int, Part]], rate: int, columns: int) -> Ints:
    own = [classes(part.columns, rate) for _, part in parts]
    first, step, count = np.concatenate([np.zeros((0, 3), np.int64), *own]).T
    lists = np.repeat([rate * p for p, _ in parts], [*map(len, own)]).astype(np.int64) + first % rate
    run, done = cut(count, columns)
    nothing = np.zeros(len(run), np.int64)
    return np.stack(
        (lists[run], first[run] + done * step[run], step[run], np.minimum(count[run] - done, columns), nothing), axis=1
    )


def _serves(relation: Relation, problem: Problem, tiles: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return which query heads of each tile of keys the relation serves."""
    per_head = problem.heads // problem.kv_heads
    heads = tiles["head"].astype(np.int64)[:, None] * per_head + np.arange(per_head)
    start, stop = relation.heads
    return (start <= heads) & (heads < stop)


class DeviceGroup(NamedTuple):
    """`tiles`, `spans`, `strips` and `biases`, as `Tables` has them, and that row i of a tile sees `i - back .. i + ahead`."""

    tables: tuple[Tensor, ...]
    back: int
    ahead: int


@dataclass(frozen=True, eq=False)
class DeviceTables(Kept):
    """The tables of each group of branches, in the order of launches."""

    groups: tuple[DeviceGroup, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [x for group in self.groups for x in group.tables]


def device_tables(problem: Problem, sizes: Sizes, kind: str, device: torch.device) -> DeviceTables:
    """Return on `device` the tables of the tiles that `kind` names, for a kernel of these `sizes`; see `kept`."""
    facts = problem.seq, problem.heads, problem.kv_heads, problem.is_causal, sizes.rows, sizes.columns
    key = "triton tables", problem.pattern.to_json(), facts, kind
    return kept(key, partial(_copied, problem, sizes, kind, device), problem, device)


def _copied(problem: Problem, sizes: Sizes, kind: str, device: torch.device) -> DeviceTables:
    tables = DeviceTables(tuple(_on(device, problem, group, kind, sizes) for group in schedule(problem, sizes.rows).groups))
    if kind == KEYS or not problem.requires_grad:  # three kernels have tables of their own: those of keys are the largest
        entries = 3 if problem.requires_grad else 1
        expect_room(problem, entries * tables.nbytes, entries)
    return tables


def _on(device: torch.device, problem: Problem, group: Group, kind: str, sizes: Sizes) -> DeviceGroup:
    import torch

    made = make_tables(problem, group, kind, sizes.columns)
    tables = tuple(torch.from_numpy(x).to(device) for x in (made.tiles, made.spans, made.strips, made.biases))
    bounds = (group.ahead, group.back) if kind == KEYS else (group.back, group.ahead)
    return DeviceGroup(tables, *bounds)
