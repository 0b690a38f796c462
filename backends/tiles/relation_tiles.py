"""The tiles of a relation: of each part the rows that are `rate` apart, as many at a time as a tile has.

part --> classes of its rows, `rate` apart --> tiles of a class, for each head that the relation serves
rows of no part, other heads               --> tiles with an empty `set`, where every row must be in one
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dilkit.backends.tiles.relations import Part, Relation, relations
from dilkit.pattern.lowering import Global, Segments
from dilkit.pattern.runs import classes, complement, progressions, union
from dilkit.problem import Problem

if TYPE_CHECKING:
    from dilkit.pattern.runs import Positions

    Ints = NDArray[np.int64]


def relation_tiles(
    relation: Relation, problem: Problem, of_keys: bool, tile_rows: int, every_row: bool
) -> tuple[NDArray[np.int32], Ints]:
    """`(tiles, keys)` as `_tiles.tiles` gives them: of queries, or of keys by key/value head. The `set` of part p is p + 1."""
    heads, per_head = problem.heads, problem.heads // problem.kv_heads
    start, stop = relation.heads
    if of_keys:
        heads, start, stop = problem.kv_heads, start // per_head, -(-stop // per_head)
    parts = [(p + 1, part) for p, part in relation.numbered(of_keys)]
    bounds = (relation.ahead, relation.back) if of_keys else (relation.back, relation.ahead)
    served = [_tiles_of(parts, relation.rate, bounds, tile_rows, problem.seq)]
    if every_row:
        in_none = complement(union(*(part.rows for _, part in parts)), problem.seq)
        served.append(_without_keys(in_none, tile_rows, problem.seq))
    by_head = [_by_head(served, range(start, stop))]
    if every_row:
        whole = [_without_keys(np.array([[0, problem.seq]]), tile_rows, problem.seq)]
        by_head.append(_by_head(whole, [head for head in range(heads) if not start <= head < stop]))
    tiles = np.concatenate(by_head)
    return np.ascontiguousarray(tiles[:, :4].astype(np.int32)), tiles[:, 4]


def part_table(relation: Relation) -> NDArray[np.int32]:
    """`(records, 4)`, as kernels/dilated.cuh of the CUDA kernels reads it: a record for each part, then the runs of columns.

    part    its first run, minus how many they are, and the query heads start .. stop - 1
    run     low, step, and high, of the positions low, low + step, ... below high; whether they are counted from a tile's rows
    """
    of_row, columns = relation.rate > 1, (part.columns for part in relation.parts)
    if of_row:
        runs_of_part = [np.insert(x, 1, relation.rate, axis=1) for x in columns]
    else:
        steps = [progressions(x).T for x in columns]
        runs_of_part = [np.stack((first, step, first + (count - 1) * step + 1), axis=1) for first, step, count in steps]
    count = np.array([*map(len, runs_of_part)], np.int64)
    parts = np.stack((np.cumsum(count) - count, -count, *(np.full(len(runs_of_part), head) for head in relation.heads)), axis=1)
    runs = np.concatenate([np.zeros((0, 3), np.int64), *runs_of_part])
    return np.concatenate((parts, np.insert(runs, 3, of_row, axis=1))).astype(np.int32)


@lru_cache(maxsize=1024)
def most_runs(problem: Problem) -> int:
    """Return the most runs of columns of a part of a relation of `problem`."""
    forms = problem.forms
    if not any(isinstance(form, Global) and len(form.columns) > 1 for form in forms):
        return 0 if all(isinstance(form, Segments) for form in forms) else 2
    tables = (part_table(relation)[: len(relation.parts), 1] for relation in relations(problem))
    return int(max((-table.min() for table in tables if len(table)), default=0))


def _without_keys(rows: Positions, tile_rows: int, seq: int) -> Ints:
    return _tiles_of([(0, Part(rows, np.zeros((0, 2), np.int64)))], 1, (0, 0), tile_rows, seq)


def _tiles_of(parts: list[tuple[int, Part]], rate: int, bounds: tuple[int, int], tile_rows: int, seq: int) -> Ints:
    """Return the tiles source one head `(tiles, 5)`: first row, set, step, rows, and about how many columns each sees.

    `parts` are numbered by their `set`.
    """
    row_classes = [classes(part.rows, rate) for _, part in parts]
    first, step, count = np.concatenate([np.zeros((0, 3), np.int64), *row_classes]).T
    numbers = np.array([(number, np.diff(part.columns).sum()) for number, part in parts], np.int64).reshape(-1, 2)
    number, columns = np.repeat(numbers, np.array([*map(len, row_classes)], np.int64), axis=0).T
    tiles = -(-count // tile_rows)
    source = np.repeat(np.arange(len(first)), tiles)
    before = (np.arange(len(source)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile_rows
    row, rows = first[source] + before * step[source], np.minimum(count[source] - before, tile_rows)
    low, high = np.maximum(row - bounds[0], 0), np.minimum(row + (rows - 1) * step[source] + bounds[1] + 1, seq)
    seen = np.clip(high - low, 0, columns[source]) // rate
    return np.stack((row, number[source], step[source], rows, seen), axis=1)


def _by_head(tiles: list[Ints], heads: range | list[int]) -> Ints:
    """The tiles of one head, for each of the heads: `TILE`s as numbers, and how many columns they see."""
    of_one = np.concatenate([np.zeros((0, 5), np.int64), *tiles])
    head = np.repeat(np.asarray(heads, np.int64), len(of_one))
    row, chosen, step, rows, seen = np.tile(of_one, (len(heads), 1)).T
    packed = (head | rows << 16).astype(np.uint32).view(np.int32)
    return np.stack((row, chosen, step, packed, seen), axis=1)
