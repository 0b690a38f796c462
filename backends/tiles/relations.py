"""What branches of other kinds than segments show: relations of queries and keys, each of which is one launch.

    query i sees key j  if  i and j are in one part, (i - j) mod rate == 0, and  i - back <= j <= i + ahead

    SlidingWindow, Strided     a part of all tokens; of a stride the bounds are beyond all tokens
    GlobalTokens               two parts: the global rows see all columns, the other rows the global columns

For the gradients of keys the relation is turned round: keys are rows, queries are columns, and `back` and `ahead` change places.
With overlap="once" a relation leaves out what those before it have shown, as `dilkit.backends.once` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dilkit.backends import once
from dilkit.pattern import Branch, DilatedSegment, GlobalTokens, SlidingWindow, Strided
from dilkit.pattern.runs import complement, difference, runs_of, union
from dilkit.problem import Problem

if TYPE_CHECKING:
    from dilkit.pattern.runs import Runs

KINDS = frozenset(cls.kind for cls in (SlidingWindow, Strided, GlobalTokens))
"""The kinds of branches that are relations."""

FAR = 2**30 - 1
"""A bound that no key is beyond: as far as two tokens of the longest sequence are apart."""


class Part(NamedTuple):
    """Rows that see the same columns, each as runs `(n, 2)` below the length of the sequence."""

    rows: Runs
    columns: Runs


@dataclass(frozen=True, eq=False)
class Relation:
    """What the query heads `heads[0] .. heads[1] - 1` see. The rows of different parts are different."""

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
        """The parts of queries, and then those of keys."""
        return (*self.queries, *self.keys)

    def numbered(self, of_keys: bool) -> list[tuple[int, Part]]:
        """The parts of one side, by their place among all."""
        first, parts = (len(self.queries), self.keys) if of_keys else (0, self.queries)
        return list(enumerate(parts, first))


def relations(problem: Problem) -> Iterator[Relation]:
    """The relations of all branches of `problem.pattern` that are no segments. Raises TypeError for kinds beyond `KINDS`."""
    branches, together = problem.pattern.branches, problem.pattern.overlap == "once"
    for at, branch in enumerate(branches):
        if isinstance(branch, DilatedSegment):
            continue
        if branch.kind not in KINDS:
            raise TypeError(f"branch {branch!r} is of kind {branch.kind!r}; tiles are known for {', '.join(sorted(KINDS))}")
        for heads in _ranges(branches, branch, problem.heads) if together else [branch.heads or (0, problem.heads)]:
            before = once.globals_before(branches, at, heads[0]) if together else ()
            without = union(*(runs_of(x) for x in before if x.direction == "both")), union(*map(runs_of, before))
            if isinstance(branch, GlobalTokens):
                yield _global(branch, heads, *without, problem)
            else:
                yield from _band(branch, heads, *without, once.beyond(branches, at, heads[0]) if together else 0, problem)


def _ranges(branches: tuple[Branch, ...], branch: Branch, heads: int) -> Iterator[tuple[int, int]]:
    """The heads of `branch`, in ranges that the same branches serve."""
    ends = {0, heads}.union(*(other.heads for other in branches if other.heads))
    yield from ((start, stop) for start, stop in pairwise(sorted(ends)) if branch.serves(start))


def _band(branch: Branch, heads: tuple[int, int], queries: Runs, keys: Runs, beyond: int, problem: Problem) -> Iterator[Relation]:
    """Pairs from `beyond` on up to the reach of a window or stride, without these queries and keys."""
    seq = max(problem.seq, 1)
    reach, rate = (branch.reach if isinstance(branch, SlidingWindow) else FAR), min(once.rate_of(branch), seq)
    reach, rate = (min(reach, FAR), rate) if reach and rate < seq else (0, 1)
    rows, columns = complement(queries, problem.seq), complement(keys, problem.seq)
    bounds = [(reach, 0 if problem.is_causal else reach)] if not beyond else [(reach, -beyond)]
    if beyond and not problem.is_causal:
        bounds.append((-beyond, reach))
    for back, ahead in bounds if reach >= beyond else ():
        yield Relation(heads, _seeing(Part(rows, columns)), _seeing(Part(columns, rows)), rate, back, ahead)


def _global(branch: GlobalTokens, heads: tuple[int, int], queries: Runs, keys: Runs, problem: Problem) -> Relation:
    """Pairs of which one is global, without these queries and keys."""
    seq, tokens = problem.seq, runs_of(branch)
    own = tokens if branch.direction == "both" else np.zeros((0, 2), np.int64)
    parts = _global_parts(own, tokens, queries, keys, seq), _global_parts(tokens, own, keys, queries, seq)
    return Relation(heads, *parts, ahead=0 if problem.is_causal else FAR)


def _global_parts(rows: Runs, columns: Runs, without_rows: Runs, without_columns: Runs, seq: int) -> tuple[Part, ...]:
    """The rows `rows` see all, the others the columns `columns`."""
    seeing_all = Part(difference(rows, without_rows, seq), complement(without_columns, seq))
    others = Part(complement(union(rows, without_rows), seq), difference(columns, without_columns, seq))
    return _seeing(seeing_all, others)


def _seeing(*parts: Part) -> tuple[Part, ...]:
    """The parts that have both rows and columns."""
    return tuple(part for part in parts if len(part.rows) and len(part.columns))
