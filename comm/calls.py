"""Calls: small problems of equal size, computed together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilkit.comm.parts import Part, Run, expand, part_key
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


def make_calls(problems: Iterable[SmallProblem], starts: Starts, batch: int, most_rows: int) -> Iterator[Call]:
    """These problems as calls, equal ones together, up to about `most_rows` rows of queries in a call."""
    alike: dict[tuple[Any, ...], list[SmallProblem]] = defaultdict(list)
    for problem in problems:
        queries, keys = (sum(part.count for part in parts) for parts in problem[:2])
        if queries and keys:
            first = problem.queries[0]
            rows, causal = max(queries, keys), problem.is_causal
            key = (first.spread.branch, problem.turn, problem.pattern, rows, first.width, causal, queries == keys)
            alike[key].append(problem)
    for (_, _, pattern, rows, width, is_causal, equal), group in alike.items():
        at_once = max(1, most_rows // (rows * width * max(batch, 1)))
        for first_of_call in range(0, len(group), at_once):
            some = group[first_of_call : first_of_call + at_once]
            real = (None, None) if equal else (_real(some, 0, rows, width, batch), _real(some, 1, rows, 1, batch))
            where = partial(_where, some, rows, batch)
            queries, results = (where(starts[name], 0, width) for name in ("q", "qq"))
            keys, values, flags = (where(starts[name], 1, 1) for name in ("k", "v", "kk"))
            yield Call(pattern, rows, width, is_causal, queries, keys, values, results, flags, *real)


def _where(problems: Sequence[SmallProblem], rows: int, batch: int, starts: PartStarts, at: int, width: int) -> Tensor:
    """The rows of all problems' queries (`at` 0) or keys (1), each filled up to `rows` with its first."""
    runs: list[Run] = []
    for problem in problems:
        parts: list[Part] = problem[at]
        found = [starts[part_key(part)] for part in parts]
        runs += found
        if missing := rows - sum(part.count for part in parts):
            runs.append((found[0][0], 0, missing, width, found[0][4]))
    return expand(runs, batch)


def _real(problems: Sequence[SmallProblem], at: int, rows: int, width: int, batch: int) -> Tensor:
    counts = torch.tensor([sum(part.count for part in problem[at]) for problem in problems])
    return (torch.arange(rows) < counts[:, None]).repeat(batch, 1).repeat_interleave(width, 1).view(-1)
