"""Forms other than segments as relations of queries and keys, each of which is one launch.

    query i sees key j  if  i and j are in one part, (i - j) mod rate == 0, and  i - back <= j <= i + ahead

    Band       a part of all tokens, without those that take no part in it
    Global     two parts: the global rows see all columns, the other rows the global columns
    Runs       a part for each list of runs of columns: the rows that see it; of long lists one relation for so many runs each

For the gradients of keys the relation is turned round: keys are rows, queries are columns, and `back` and `ahead` change places.

    part --> classes of its rows, `rate` apart --> tiles of a class, for each head that the relation serves
    rows of no part, other heads               --> tiles with an empty `set`, where every row must be in one
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dilkit.pattern.lowering import Band, Form, Global, Runs, RunTable, Segments
from dilkit.pattern.runs import classes, complement, difference, progressions, union
from dilkit.problem import Problem

if TYPE_CHECKING:
    from dilkit.pattern.runs import Positions

    Ints = NDArray[np.int64]

FORMS = frozenset({Segments.name, Band.name, Global.name, Runs.name})

MOST_RUNS = 64
"""Runs of columns that the rows of a tile see through a relation, at most: CUDA kernels keep them in shared memory."""

FAR = 2**30 - 1
"""A bound that no key is beyond: as far as two tokens of the longest sequence are apart."""


class Part(NamedTuple):
    """Rows that see the same columns, each as runs `(n, 2)` below the length of the sequence."""

    rows: Positions
    columns: Positions


@dataclass(frozen=True, eq=False)
class Relation:
    """Relation of the query heads `heads[0] .. heads[1] - 1` to their keys. Parts share no rows."""

    heads: tuple[int, int]
    queries: tuple[Part, ...]
    """Queries as rows, keys as columns."""
    keys: tuple[Part, ...]
    """Keys as rows, queries as columns."""
    rate: int = 1
    back: int = FAR
    ahead: int = FAR

    @property
    def parts(self) -> tuple[Part, ...]:
        return (*self.queries, *self.keys)

    def numbered(self, of_keys: bool) -> list[tuple[int, Part]]:
        """Return the parts of one side, each with its number among the parts of both sides."""
        first, parts = (len(self.queries), self.keys) if of_keys else (0, self.queries)
        return list(enumerate(parts, first))


def relations(problem: Problem) -> Iterator[Relation]:
    """Return the relations of all forms but segments. Raises TypeError for forms beyond `FORMS`."""
    for form in problem.forms:
        if isinstance(form, Band):
            yield from _band(form, problem)
        elif isinstance(form, Global):
            queries, keys = _left_out(form)
            of_queries = _global_parts(form.rows, form.columns, queries, keys, problem.seq)
            of_keys = _global_parts(form.columns, form.rows, keys, queries, problem.seq)
            yield Relation(form.heads, of_queries, of_keys, ahead=0 if problem.is_causal else FAR)
        elif isinstance(form, Runs):
            yield from _runs(form, problem)
        elif not isinstance(form, Segments):
            call = problem.pattern.branches[form.branch].call()
            raise TypeError(f"branch {call} is lowered to {form.name}; tiles are known for {', '.join(sorted(FORMS))}")


def _left_out(form: Form) -> tuple[Positions, Positions]:
    none = np.zeros((0, 2), np.int64)
    return tuple(none if positions is None else positions for positions in (form.without_rows, form.without_columns))  # type: ignore[return-value]


def _band(form: Band, problem: Problem) -> Iterator[Relation]:
    """Split a band with a minimum distance into two relations: keys before a query, and keys after it."""
    back, ahead = min(form.back, FAR), 0 if problem.is_causal else min(form.ahead, FAR)
    rate = form.rate
    if rate >= max(problem.seq, 1) or not (form.back or form.ahead):  # tokens see themselves alone
        back = ahead = 0
        rate = 1
    rows, columns = (complement(positions, problem.seq) for positions in _left_out(form))
    bounds = [(back, -form.first), (-form.first, ahead)] if form.first else [(back, ahead)]
    for before, after in bounds:
        if before + after >= 0:
            yield Relation(form.heads, _seeing(Part(rows, columns)), _seeing(Part(columns, rows)), rate, before, after)


def _global_parts(
    rows: Positions, columns: Positions, without_rows: Positions, without_columns: Positions, seq: int
) -> tuple[Part, ...]:
    seeing_all = Part(difference(rows, without_rows, seq), complement(without_columns, seq))
    others = Part(complement(union(rows, without_rows), seq), difference(columns, without_columns, seq))
    return _seeing(seeing_all, others)


def _runs(form: Runs, problem: Problem) -> Iterator[Relation]:
    """Split a run table into relations of at most `MOST_RUNS` runs of columns a row, which add up to the form."""
    queries, keys = _left_out(form)
    of_queries = _parts_of_runs(form.queries, queries, keys, problem.seq)
    of_keys = _parts_of_runs(form.keys, keys, queries, problem.seq)
    most = max((len(part.columns) for part in (*of_queries, *of_keys)), default=1)
    for first in range(0, most, MOST_RUNS):
        runs = slice(first, first + MOST_RUNS)
        some_queries, some_keys = (_seeing(*(Part(own, seen[runs]) for own, seen in parts)) for parts in (of_queries, of_keys))
        yield Relation(form.heads, some_queries, some_keys, ahead=0 if problem.is_causal else FAR)


def _parts_of_runs(table: RunTable, without_rows: Positions, without_columns: Positions, seq: int) -> tuple[Part, ...]:
    """Group the rows of a table into parts that see the same columns."""
    table = table.below(seq).joined()
    rows = np.stack((np.append(0, table.stop[:-1]), table.stop), axis=1)
    alike: dict[bytes, tuple[list[Positions], Positions]] = {}
    for own, columns in zip(rows[:, None], np.split(table.columns, np.cumsum(table.runs)[:-1]), strict=True):
        alike.setdefault(columns.tobytes(), ([], columns))[0].append(own)
    parts = (Part(union(*own), columns) for own, columns in alike.values())
    if len(without_rows) or len(without_columns):
        parts = (Part(difference(own, without_rows, seq), difference(of, without_columns, seq)) for own, of in parts)
    return _seeing(*parts)


def _seeing(*parts: Part) -> tuple[Part, ...]:
    return tuple(part for part in parts if len(part.rows) and len(part.columns))


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
    """Make the table `(records, 4)` that kernels/dilated.cuh reads: a record for each part, then the runs of columns.

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
    """Return the tiles of one head `(tiles, 5)`: first row, set (a part's number), step, rows, and about how many columns."""
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
    of_one = np.concatenate([np.zeros((0, 5), np.int64), *tiles])
    head = np.repeat(np.asarray(heads, np.int64), len(of_one))
    row, chosen, step, rows, seen = np.tile(of_one, (len(heads), 1)).T
    packed = (head | rows << 16).astype(np.uint32).view(np.int32)
    return np.stack((row, chosen, step, packed, seen), axis=1)
