"""Stacks of small problems: attention of one head within one segment, equal ones together in one call of a backend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilkit.comm.passes.kept_rows import RowRun, row_numbers
from dilkit.comm.plan.kept_rows import KeptRows, ProblemRows, SmallProblem
from dilkit.pattern import GlobalTokens, Pattern


@dataclass(frozen=True)
class ProblemStack:
    """Equal small problems of one branch that a rank computes: `rows` queries and keys each, `width` query heads on one.

    `queries` `(batch * problems * rows * width,)` and `keys` `(batch * problems * rows,)` say where in what this rank received
    they lie (`results`: the same for messages of queries alone; `flags`: for messages of keys alone). Where a problem has fewer
    queries or keys than `rows`, others stand in, which `real_queries` and `real_keys` exclude; None: all are real. `places`
    `(batch * problems, 5)`: where they lie in the whole, as `dilkit.op.dropout.Dropout` has it, heads counted among the rank's.
    `first_head`: the first query head of the first problem, which is that of all where they were stacked by head.
    """

    pattern: Pattern
    rows: int
    width: int
    first_head: int
    is_causal: bool
    places: NDArray[np.int64]
    queries: Tensor
    keys: Tensor
    values: Tensor
    results: Tensor
    flags: Tensor
    real_queries: Tensor | None
    real_keys: Tensor | None

    @property
    def heads(self) -> slice:
        """The query heads of all problems, where they were stacked by head."""
        return slice(self.first_head, self.first_head + self.width)

    @property
    def index_tensors(self) -> dict[str, Tensor]:
        """All its tensors, by name."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of all its row numbers."""
        return self.places.nbytes + sum(x.nbytes for x in {id(x): x for x in self.index_tensors.values()}.values())

    def to(self, device: torch.device) -> ProblemStack:
        """The same for rows on `device`."""
        if device == self.queries.device:
            return self
        moved = {id(x): x.to(device) for x in self.index_tensors.values()}
        tensors: dict[str, Any] = {name: moved[id(x)] for name, x in self.index_tensors.items()}
        return replace(self, **tensors)


RunsByRows = dict[KeptRows, RowRun]
RunsByRole = dict[str, RunsByRows]
"""Where kept rows lie: "q", "k", "v" in messages of all three; "qq", "kk" in messages of queries or of keys alone."""


def stack_rows(rows: int) -> int:
    """Query rows that a stack should not exceed, on a rank that holds `rows`: its rows are copied, so not too many.

    Enough to keep a device busy, and next to nothing beside what the rank holds.
    """
    return max(4096, rows // 64)


SHORT_SIDE = 1024
"""A problem whose queries and keys differ in number is cut into square tiles: of the shorter side, or of this many rows."""


class _Tile(NamedTuple):
    """Query rows and key rows of a problem, each `(first, last + 1)`."""

    problem: SmallProblem
    query_range: tuple[int, int]
    key_range: tuple[int, int]

    @property
    def queries(self) -> int:
        return self.query_range[1] - self.query_range[0]

    @property
    def keys(self) -> int:
        return self.key_range[1] - self.key_range[0]

    @property
    def pattern(self) -> Pattern:
        """What the queries follow. Where they are many more or many fewer than the keys, no more is scored than they see."""
        if self.problem.pattern is not None:
            return self.problem.pattern
        if self.problem.is_causal or 2 * min(self.queries, self.keys) > max(self.queries, self.keys):
            return Pattern.dense()
        return Pattern.of(GlobalTokens(self.keys, "read") if self.keys < self.queries else GlobalTokens(self.queries))

    @property
    def place(self) -> tuple[int, int, int, int]:
        """The first query head, the positions of the first query and of the first key, and the step from row to row."""
        queries, keys = self.problem.queries, self.problem.keys
        start, key_start = (
            side.start + side.stride * at for side, at in ((queries, self.query_range[0]), (keys, self.key_range[0]))
        )
        return queries.kept[0].first, start, key_start, queries.stride


def _tiles(problem: SmallProblem) -> Iterator[_Tile]:
    queries, keys = problem.queries.rows, problem.keys.rows
    side = max(min(queries, keys), SHORT_SIDE)
    for q in range(0, queries, side):
        for k in range(0, keys, side):
            yield _Tile(problem, (q, min(q + side, queries)), (k, min(k + side, keys)))


def stack_problems(
    problems: Iterable[SmallProblem], runs: RunsByRole, batch: int, most_rows: int, by_head: bool = False
) -> Iterator[ProblemStack]:
    """These problems as stacks, equal ones together, up to about `most_rows` query rows in a stack.

    `by_head`: those of different heads are apart.
    """
    alike: dict[tuple[Any, ...], list[_Tile]] = defaultdict(list)
    for problem in problems:
        for tile in _tiles(problem):
            first = problem.queries.kept[0]
            apart = (first.branch, problem.key_group, tile.query_range[0], tile.key_range[0], first.first if by_head else 0)
            whole = tile.queries == tile.keys and not (problem.excluded_queries or problem.excluded_keys)
            sizes = (max(tile.queries, tile.keys), first.width, whole)
            alike[apart, tile.pattern, problem.is_causal, sizes].append(tile)
    for (_, pattern, is_causal, (rows, width, whole)), tiles in alike.items():
        at_once = max(1, most_rows // (rows * width * max(batch, 1)))
        for start in range(0, len(tiles), at_once):
            some = tiles[start : start + at_once]
            places = np.array([(number, *tile.place) for number in range(batch) for tile in some], np.int64).reshape(-1, 5)
            first_head, tensors = some[0].problem.queries.kept[0].first, _index_tensors(some, runs, rows, width, batch, whole)
            yield ProblemStack(pattern, rows, width, first_head, is_causal, places, *tensors)


def _index_tensors(
    tiles: Sequence[_Tile], runs: RunsByRole, rows: int, width: int, batch: int, whole: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The tensors of a stack in the order of its fields."""
    queries, keys = [(t.problem.queries, t.query_range) for t in tiles], [(t.problem.keys, t.key_range) for t in tiles]
    numbers: dict[tuple[int, bool], Tensor] = {}  # one tensor for roles whose rows lie alike

    def filled(name: str) -> Tensor:
        of_queries = name in ("q", "qq")
        place = id(runs[name]), of_queries
        if place not in numbers:
            numbers[place] = _filled_rows(*((queries, rows, width) if of_queries else (keys, rows, 1)), batch, runs[name])
        return numbers[place]

    of_queries, of_results, of_keys, of_values, of_flags = map(filled, ("q", "qq", "k", "v", "kk"))
    if whole:
        return of_queries, of_keys, of_values, of_results, of_flags, None, None
    real_queries = _real(queries, [tile.problem.excluded_queries for tile in tiles], rows, width, batch)
    real_keys = _real(keys, [tile.problem.excluded_keys for tile in tiles], rows, 1, batch)
    return of_queries, of_keys, of_values, of_results, of_flags, real_queries, real_keys


def _filled_rows(
    sides: Sequence[tuple[ProblemRows, tuple[int, int]]], rows: int, width: int, batch: int, runs: RunsByRows
) -> Tensor:
    """The row numbers of one side of all tiles, each filled up to `rows` with its first row."""
    numbered: list[RowRun] = []
    for side, (first, last) in sides:
        filled = _cut(side, [runs[kept] for kept in side.kept], first, last)
        numbered += filled
        if missing := rows - (last - first):
            numbered.append((filled[0][0], 0, missing, width, filled[0][4]))
    return row_numbers(numbered, batch)


def _cut(side: ProblemRows, runs: list[RowRun], first: int, last: int) -> list[RowRun]:
    """Of the runs of a side's kept rows, a line for each position, the rows `first .. last - 1` of the side."""
    if len(runs) == 1:
        ((start, step, _, width, batch_step),) = runs
        return [(start + step * (side.first + side.step * first), step * side.step, last - first, width, batch_step)]
    pieces, before = [], 0
    for start, step, lines, width, batch_step in runs:
        low, high = max(side.first + first - before, 0), min(side.first + last - before, lines)
        if low < high:
            pieces.append((start + step * low, step, high - low, width, batch_step))
        before += lines
    return pieces


def _real(
    sides: Sequence[tuple[ProblemRows, tuple[int, int]]], excluded: Sequence[tuple[int, ...]], rows: int, width: int, batch: int
) -> Tensor:
    """Which rows of one side of all tiles are real: those that fill it up are not, nor those at excluded positions."""
    real = np.zeros((len(sides), rows), np.bool_)
    for line, (side, (first, last)), edges in zip(real, sides, excluded, strict=True):
        line[: last - first] = True
        if edges:
            line[: last - first] = np.searchsorted(edges, side.positions[first:last], "right") % 2 == 0
    return torch.from_numpy(real).repeat(batch, 1).repeat_interleave(width, 1).view(-1)
