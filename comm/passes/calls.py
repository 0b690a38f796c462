"""Calls: small problems of equal size, computed together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilkit.comm.passes.parts import Part, Run, expand, part_key
from dilkit.pattern import Pattern


@dataclass(frozen=True)
class Call:
    """Equal small problems of one branch that a rank computes: `rows` queries and keys each, `width` query heads on one.

    `queries` `(batch * problems * rows * width,)` and `keys` `(batch * problems * rows,)` tell where in what this rank was sent
    they lie (`results`: the same for messages of queries alone; `flags`: for messages of keys alone). Where a problem has fewer
    queries or keys than `rows`, others stand in, which `real_queries` and `real_keys` exclude; None: all are real.
    """

    pattern: Pattern
    rows: int
    width: int
    is_causal: bool
    queries: Tensor
    keys: Tensor
    values: Tensor
    results: Tensor
    flags: Tensor
    real_queries: Tensor | None
    real_keys: Tensor | None

    @property
    def tables(self) -> dict[str, Tensor]:
        """All its tensors, by name."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def to(self, device: torch.device) -> Call:
        """The same for rows on `device`."""
        moved: dict[str, Any] = {name: x.to(device) for name, x in self.tables.items()}
        return replace(self, **moved)


class SmallProblem(NamedTuple):
    """Parts of queries of one head, and the parts of keys that they meet."""

    queries: list[Part]
    keys: list[Part]
    is_causal: bool
    pattern: Pattern = Pattern.dense()
    turn: int = 0
    """Problems with the same queries have different turns: a call has each of its rows once."""


PartStarts = dict[tuple[int, int, int], Run]
Starts = dict[str, PartStarts]
"""Where the rows of parts lie, by part: "q", "k", "v"; "qq", "kk" in messages of queries or of keys alone."""


def call_rows(rows: int) -> int:
    """Rows of queries that a call should not exceed, of a rank that holds `rows`: what it works with is copied, so not too many.

    Enough to keep a device busy, and next to nothing beside what the rank holds.
    """
    return max(4096, rows // 64)


SHORT_SIDE = 1024
"""A problem of more keys than queries, or the other way round, is cut into squares: of the shorter side, or of this many rows."""


class _Square(NamedTuple):
    """Queries `first .. last - 1` of a problem, and keys likewise."""

    problem: SmallProblem
    queries: tuple[int, int]
    keys: tuple[int, int]

    def count(self, at: int) -> int:
        """Queries (`at` 1) or keys (2)."""
        return self[at][1] - self[at][0]


def _squares(problem: SmallProblem) -> Iterator[_Square]:
    queries, keys = (sum(part.count for part in parts) for parts in (problem.queries, problem.keys))
    side = max(min(queries, keys), SHORT_SIDE)
    for q in range(0, queries, side):
        for k in range(0, keys, side):
            yield _Square(problem, (q, min(q + side, queries)), (k, min(k + side, keys)))


def make_calls(problems: Iterable[SmallProblem], starts: Starts, batch: int, most_rows: int) -> Iterator[Call]:
    """These problems as calls, equal ones together, up to about `most_rows` rows of queries in a call."""
    alike: dict[tuple[Any, ...], list[_Square]] = defaultdict(list)
    for problem in problems:
        for square in _squares(problem):
            queries, keys, first = square.count(1), square.count(2), problem.queries[0]
            turn = (first.spread.branch, problem.turn, square.queries[0], square.keys[0])
            sizes = (max(queries, keys), first.width, queries == keys)
            alike[turn, problem.pattern, problem.is_causal, sizes].append(square)
    for (_, pattern, is_causal, (rows, width, equal)), group in alike.items():
        at_once = max(1, most_rows // (rows * width * max(batch, 1)))
        for first_of_call in range(0, len(group), at_once):
            some = group[first_of_call : first_of_call + at_once]
            real = (None, None) if equal else (_real(some, 1, rows, width, batch), _real(some, 2, rows, 1, batch))
            where = partial(_where, some, rows, batch)
            queries, results = (where(starts[name], 1, width) for name in ("q", "qq"))
            keys, values, flags = (where(starts[name], 2, 1) for name in ("k", "v", "kk"))
            yield Call(pattern, rows, width, is_causal, queries, keys, values, results, flags, *real)


def _where(squares: Sequence[_Square], rows: int, batch: int, starts: PartStarts, at: int, width: int) -> Tensor:
    """The rows of all squares' queries (`at` 1) or keys (2), each filled up to `rows` with its first."""
    runs: list[Run] = []
    for square in squares:
        parts: list[Part] = square.problem[at - 1]
        found = _cut([starts[part_key(part)] for part in parts], *(width * bound for bound in square[at]))
        runs += found
        if missing := rows - square.count(at):
            runs.append((found[0][0], 0, missing, width, found[0][4]))
    return expand(runs, batch)


def _cut(runs: list[Run], first: int, last: int) -> list[Run]:
    """Of runs of one line each, the rows `first .. last - 1`."""
    found, before = [], 0
    for start, step, lines, length, batch_step in runs:
        low, high = max(first - before, 0), min(last - before, length)
        if low < high:
            found.append((start + low, step, lines, high - low, batch_step))
        before += length
    return found


def _real(squares: Sequence[_Square], at: int, rows: int, width: int, batch: int) -> Tensor:
    counts = torch.tensor([square.count(at) for square in squares])
    return (torch.arange(rows) < counts[:, None]).repeat(batch, 1).repeat_interleave(width, 1).view(-1)
