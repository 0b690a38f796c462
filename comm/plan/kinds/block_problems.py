"""What a rank computes of a branch of blocks, beside what it computes by itself: a few problems in slots, or one a rectangle.

parts of queries    | 3 | 4 | 7 |                  in slots: one problem for all of them. Each part has a slot, with the
parts of keys       | 0 | 1 | 5 | 6 | 9 |          layout of what is seen among these parts
                                                   at equal steps: parts of queries that follow each other, and
                                                   parts of keys that do, where all see all
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np

from dilkit.comm.plan.kept_rows import KeptRows, ProblemRows, SlotProblem, SmallProblem
from dilkit.comm.plan.kinds.part_runs import PartRuns, union
from dilkit.comm.plan.kinds.seen_blocks import SeenRuns
from dilkit.comm.plan.sharded_segments import IntArray, ServedHead
from dilkit.pattern import BlockLayout, BlockSparse, Pattern

if TYPE_CHECKING:
    from dilkit.comm.plan.kinds.blocks import BlockExchange

Received = dict[tuple[int, int], list[KeptRows]]
"""By rank of origin and head, ascending: of queries by the first query head, of keys by the key/value head."""


@dataclass(frozen=True, eq=False)
class BlockProblems:
    """The problems of one rank: `lines` are what it computes."""

    exchange: BlockExchange
    rank: int
    lines: SeenRuns

    @classmethod
    def of(cls, exchange: BlockExchange, rank: int) -> BlockProblems:
        """Those of a rank."""
        return cls(exchange, rank, exchange.division.lines[exchange.division.computed_at == rank])

    @cached_property
    def received(self) -> tuple[Received, Received]:
        """The kept rows that reach this rank, of queries and of keys."""
        queries: Received = {}
        keys: Received = {}
        for source in self.exchange.peers(self.rank):
            message = self.exchange.message(source, self.rank)
            queries |= {(source, first): list(some) for first, some in groupby(message.queries, lambda kept: kept.first)}
            keys |= {(source, head): list(some) for head, some in groupby(message.keys, lambda kept: kept.kv_head)}
        return queries, keys

    def triangles(self) -> Iterator[SmallProblem]:
        """What parts of this rank see of themselves with causality."""
        lines = self.exchange.triangles
        lines = lines[lines.keys_of == self.rank]
        for unit, part in zip(lines.unit.tolist(), lines.query.tolist(), strict=True):
            for head in self.exchange.units[unit]:
                yield SmallProblem(*self._sides(head, (part, part + 1), (part, part + 1)), True, None, unit)

    def in_slots(self) -> Iterator[SlotProblem | SmallProblem]:
        """One problem for each head."""
        yield from self.triangles()
        for unit in range(len(self.exchange.units)):
            if len(lines := self.lines[self.lines.unit == unit]):
                yield from self._of_unit(unit, lines)

    def _of_unit(self, unit: int, lines: SeenRuns) -> Iterator[SlotProblem]:
        rank, rows = self.exchange.parts.rank, self.exchange.parts.rows
        queries = union(PartRuns(rank[lines.query], lines.query, lines.query + 1))
        keys = union(PartRuns(lines.keys_of, lines.start, lines.stop))
        of_query, of_keys = _Slots(queries), _Slots(keys)
        slots, slot = max(of_query.count, of_keys.count), max(int(rows[some.parts].max()) for some in (of_query, of_keys))
        at = of_query.number(lines.query)
        runs = np.stack((0 * at, at, of_keys.number(lines.start), of_keys.number(lines.stop - 1) + 1), axis=1)
        pattern = Pattern.of(BlockSparse(BlockLayout.of_runs(runs, 1, slots), slot))
        for head in self.exchange.units[unit]:
            yield SlotProblem(
                tuple(self._side(0, head, span) for span in of_query.filled(rows, slot)),
                tuple(self._side(1, head, span) for span in of_keys.filled(rows, slot)),
                pattern,
                slot,
                slots,
                unit,
            )

    def at_equal_steps(self) -> Iterator[SmallProblem]:
        """One problem for each head of each rectangle."""
        yield from self.triangles()
        levels: dict[tuple[str, int], IntArray] = {}
        for unit, queries, keys in self._rectangles():
            level = self._level(levels, unit, queries, keys)
            for head in self.exchange.units[unit]:
                yield SmallProblem(*self._sides(head, queries, keys), False, None, level)

    def _rectangles(self) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
        """Unit, and the parts of queries and of keys from one to before another, those of most parts of queries first."""
        lines, rank = self.lines, self.exchange.parts.rank
        lines = lines[np.lexsort((lines.query, lines.stop, lines.start, rank[lines.query], lines.unit))]
        alike = np.stack((lines.unit, rank[lines.query], lines.start, lines.stop, lines.query - np.arange(len(lines))))
        first = np.flatnonzero((np.diff(alike, axis=1, prepend=-1) != 0).any(0))
        count = np.diff(first, append=len(lines))
        for at, rows in sorted(zip(first.tolist(), count.tolist(), strict=True), key=lambda one: -one[1]):
            start = int(lines.query[at])
            yield int(lines.unit[at]), (start, start + rows), (int(lines.start[at]), int(lines.stop[at]))

    def _level(self, levels: dict[tuple[str, int], IntArray], unit: int, queries: tuple[int, int], keys: tuple[int, int]) -> int:
        """A number for a rectangle that differs from those with which it has queries or keys in common."""
        used = []
        for name, number, span in (("queries", unit, queries), ("keys", int(self.exchange.group[unit]), keys)):
            of_parts = levels.setdefault((name, number), np.zeros(len(self.exchange.parts), np.int64))
            used.append(of_parts[slice(*span)])
        level = int(max(some.max() for some in used))
        for some in used:
            some[:] = level + 1
        return level + len(self.exchange.units)  # triangles have the numbers before

    def _sides(self, head: ServedHead, queries: tuple[int, int], keys: tuple[int, int]) -> tuple[ProblemRows, ProblemRows]:
        return self._side(0, head, queries), self._side(1, head, keys)

    def _side(self, role: int, head: ServedHead, span: tuple[int, int]) -> ProblemRows:
        """Parts of queries (`role` 0) or of keys, which are within one of the kept rows of a rank."""
        edges, rank = self.exchange.parts.edges, int(self.exchange.parts.rank[span[0]])
        start, stop = edges[list(span)].tolist()
        kept = self.received[role][rank, head.kv_head if role else head.first]
        rows = kept[bisect_right(kept, start, key=lambda rows: rows.start) - 1]
        return ProblemRows((rows,), start - rows.start, 1, stop - start)


class _Slots:
    """Slots for the parts of these runs, one after the other."""

    def __init__(self, runs: PartRuns) -> None:
        self.runs = runs
        self.before = np.cumsum(runs.stop - runs.start) - (runs.stop - runs.start)

    @cached_property
    def parts(self) -> IntArray:
        """The part in each slot."""
        of = np.repeat(np.arange(len(self.before)), self.runs.stop - self.runs.start)
        numbers: IntArray = np.arange(len(of)) - self.before[of] + self.runs.start[of]
        return numbers

    @property
    def count(self) -> int:
        """How many slots there are."""
        return len(self.parts)

    def number(self, parts: IntArray) -> IntArray:
        """The slot of each of these parts."""
        of = np.searchsorted(self.runs.start, parts, "right") - 1
        slots: IntArray = self.before[of] + parts - self.runs.start[of]
        return slots

    def filled(self, rows: IntArray, slot: int) -> Iterator[tuple[int, int]]:
        """The runs, ended after each part that does not fill its slot."""
        for start, stop in self.runs.spans:
            ends = np.flatnonzero(rows[start : stop - 1] < slot) + start + 1
            edges = [start, *ends.tolist(), stop]
            yield from pairwise(edges)
