"""Stacks of small problems: attention of one head within one segment, equal ones together in one call of a backend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilkit.comm.passes.row_index import RowRun, row_numbers
from dilkit.comm.plan.messages import HeadRows, Side, SmallProblem, length, part, positions
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
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    @property
    def nbytes(self) -> int:
        return self.places.nbytes + sum(x.nbytes for x in {id(x): x for x in self.index_tensors.values()}.values())

    def to(self, device: torch.device) -> ProblemStack:
        if device == self.queries.device:
            return self
        moved = {id(x): x.to(device) for x in self.index_tensors.values()}
        tensors: dict[str, Any] = {name: moved[id(x)] for name, x in self.index_tensors.items()}
        return replace(self, **tensors)


RunsByRows = dict[HeadRows, RowRun]
RunsByRole = dict[str, RunsByRows]
"""Places of rows: "q", "k", "v" in messages of all three; "qq", "kk" in messages of queries or of keys alone."""


def stack_rows(rows: int) -> int:
    """Return how many query rows a stack should not exceed, on a rank that holds `rows`: they are copied."""
    return max(4096, rows // 64)


SHORT_SIDE = 1024
"""A problem whose queries and keys differ in number is cut into square tiles: of the shorter side, or of this many rows."""


def stack_problems(
    problems: Iterable[SmallProblem], runs: RunsByRole, batch: int, most_rows: int, by_head: bool = False
) -> Iterator[ProblemStack]:
    """Yield these problems as stacks, equal ones together, and with `by_head` those of one head, of about `most_rows` rows."""
    alike: dict[tuple[Any, ...], list[SmallProblem]] = defaultdict(list)
    for problem in problems:
        for corner, tile in _tiles(problem):
            (branch, head, *_), slot = tile.queries[0].rows, tile.slot
            counts = length(tile.queries, slot), length(tile.keys, slot)
            whole = slot == 1 and counts[0] == counts[1] and not (tile.excluded_queries or tile.excluded_keys)
            apart = branch, problem.key_group, corner, head.first if by_head else 0
            alike[apart, tile.pattern, tile.is_causal, slot, (max(counts), head.width, whole)].append(tile)
    for (_, pattern, is_causal, _, (rows, width, whole)), tiles in alike.items():
        at_once = max(1, most_rows // (rows * width * max(batch, 1)))
        for start in range(0, len(tiles), at_once):
            some = tiles[start : start + at_once]
            first_ones = [(tile.queries[0], tile.keys[0]) for tile in some]
            ends = [(query.rows.head.first, query.start, key.start, query.stride) for query, key in first_ones]
            places = np.array([(number, *place) for number in range(batch) for place in ends], np.int64).reshape(-1, 5)
            first_head, tensors = some[0].queries[0].rows.head.first, _index_tensors(some, runs, rows, width, batch, whole)
            yield ProblemStack(pattern, rows, width, first_head, is_causal, places, *tensors)


def _tiles(problem: SmallProblem) -> Iterator[tuple[tuple[int, int], SmallProblem]]:
    if problem.slot > 1:
        yield (0, 0), problem
        return
    queries, keys = length(problem.queries), length(problem.keys)
    side = max(min(queries, keys), SHORT_SIDE)
    for q in range(0, queries, side):
        for k in range(0, keys, side):
            counts = min(side, queries - q), min(side, keys - k)
            pattern = problem.pattern or Pattern.dense()
            if not (problem.pattern or problem.is_causal) and 2 * min(counts) <= max(counts):  # no more is scored than they see
                pattern = Pattern.of(GlobalTokens(counts[1], "read") if counts[1] < counts[0] else GlobalTokens(counts[0]))
            sides = part(problem.queries, q, q + counts[0]), part(problem.keys, k, k + counts[1])
            yield (q, k), problem._replace(queries=sides[0], keys=sides[1], pattern=pattern)


def _index_tensors(
    tiles: Sequence[SmallProblem], runs: RunsByRole, rows: int, width: int, batch: int, whole: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    queries, keys, slot = [tile.queries for tile in tiles], [tile.keys for tile in tiles], tiles[0].slot
    numbers: dict[tuple[int, bool], Tensor] = {}  # one tensor for roles whose rows lie alike

    def filled(name: str) -> Tensor:
        of_queries = name in ("q", "qq")
        place = id(runs[name]), of_queries
        if place not in numbers:
            sides, row_width = (queries, width) if of_queries else (keys, 1)
            numbers[place] = _filled_rows(sides, slot, rows, row_width, batch, runs[name])
        return numbers[place]

    of_queries, of_results, of_keys, of_values, of_flags = map(filled, ("q", "qq", "k", "v", "kk"))
    if whole:
        return of_queries, of_keys, of_values, of_results, of_flags, None, None
    real_queries = _real(queries, [tile.excluded_queries for tile in tiles], slot, rows, width, batch)
    real_keys = _real(keys, [tile.excluded_keys for tile in tiles], slot, rows, 1, batch)
    return of_queries, of_keys, of_values, of_results, of_flags, real_queries, real_keys


def _filled_rows(sides: Sequence[Side], slot: int, rows: int, width: int, batch: int, runs: RunsByRows) -> Tensor:
    """Return row numbers of one side of all tiles. A span's last row fills up its slot, and a side's last row its rest.

    Such a row has seen the same keys, so that its lse is one that they may have in a backward pass.
    """
    numbered: list[RowRun] = []
    for side in sides:
        missing = rows - length(side, slot)
        for span, filling in zip(side, [0] * (len(side) - 1) + [missing], strict=True):
            start, step, _, _, batch_step = runs[span.rows]
            numbered.append((start + step * span.first, step * span.step, span.size, width, batch_step))
            if filling := filling + length((span,), slot) - span.size:
                last = span.first + span.step * (span.size - 1)
                numbered.append((start + step * last, 0, filling, width, batch_step))
    return row_numbers(numbered, batch)


def _real(
    sides: Sequence[Side], excluded: Sequence[tuple[int, ...]], slot: int, rows: int, width: int, batch: int
) -> Tensor | None:
    """Select the rows of one side of all tiles that are neither padding nor excluded; None: all."""
    real = np.zeros((len(sides), rows), np.bool_)
    for line, side, edges in zip(real, sides, excluded, strict=True):
        filled = 0
        for span in side:
            line[filled : filled + span.size] = True
            filled += length((span,), slot)
        if edges:
            line[:filled] = np.searchsorted(edges, positions(side), "right") % 2 == 0
    return None if real.all() else torch.from_numpy(real).repeat(batch, 1).repeat_interleave(width, 1).view(-1)
