"""Forms other than segments as relations of queries and keys, each of which is one launch.

    query i sees key j  if  i and j are in one part, (i - j) mod rate == 0, and  i - back <= j <= i + ahead

    Band       a part of all tokens, without those that take no part in it
    Global     two parts: the global rows see all columns, the other rows the global columns
    Runs       a part for each list of runs of columns: the rows that see it; of long lists one relation for so many runs each

For the gradients of keys the relation is turned round: keys are rows, queries are columns, and `back` and `ahead` change places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dilkit.pattern.lowering import Band, Form, Global, Runs, RunTable, Segments
from dilkit.pattern.runs import complement, difference, union
from dilkit.problem import Problem

if TYPE_CHECKING:
    from dilkit.pattern.runs import Positions

FORMS = frozenset({Segments.name, Band.name, Global.name, Runs.name})
"""The forms that there are tiles for."""

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
        """The parts of queries, and then those of keys."""
        return (*self.queries, *self.keys)

    def numbered(self, of_keys: bool) -> list[tuple[int, Part]]:
        """The parts of one side, by their place among all."""
        first, parts = (len(self.queries), self.keys) if of_keys else (0, self.queries)
        return list(enumerate(parts, first))


def relations(problem: Problem) -> Iterator[Relation]:
    """The relations of all forms of `problem.pattern` but its segments. Raises TypeError for forms beyond `FORMS`."""
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
    """The queries and the keys that take no part."""
    none = np.zeros((0, 2), np.int64)
    return tuple(none if positions is None else positions for positions in (form.without_rows, form.without_columns))  # type: ignore[return-value]


def _band(form: Band, problem: Problem) -> Iterator[Relation]:
    """A band that begins at a distance is two relations: the keys before a query, and those after it."""
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
    """The rows `rows` see all, the others the columns `columns`."""
    seeing_all = Part(difference(rows, without_rows, seq), complement(without_columns, seq))
    others = Part(complement(union(rows, without_rows), seq), difference(columns, without_columns, seq))
    return _seeing(seeing_all, others)


def _runs(form: Runs, problem: Problem) -> Iterator[Relation]:
    """The first `MOST_RUNS` runs of columns of every row, the next ones, and so on: each side by itself adds up to the form."""
    queries, keys = _left_out(form)
    of_queries = _parts_of_runs(form.queries, queries, keys, problem.seq)
    of_keys = _parts_of_runs(form.keys, keys, queries, problem.seq)
    most = max((len(part.columns) for part in (*of_queries, *of_keys)), default=1)
    for first in range(0, most, MOST_RUNS):
        runs = slice(first, first + MOST_RUNS)
        some_queries, some_keys = (_seeing(*(Part(own, seen[runs]) for own, seen in parts)) for parts in (of_queries, of_keys))
        yield Relation(form.heads, some_queries, some_keys, ahead=0 if problem.is_causal else FAR)


def _parts_of_runs(table: RunTable, without_rows: Positions, without_columns: Positions, seq: int) -> tuple[Part, ...]:
    """The rows of a table that see the same columns, which are a part wherever they lie."""
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
    """The parts that have both rows and columns."""
    return tuple(part for part in parts if len(part.rows) and len(part.columns))
