"""Block lists over ranks: a rank is sent the blocks of keys that its own blocks of queries see.

    rank              |------- 0 -------|------- 1 -------|
    blocks            |  0  |  1  |  2  |  3  |  4  |  5  |
    queries of rank 1                   light: sees 0, 3, 5        block 0 of keys and values goes to rank 1
    queries of rank 1                   heavy: sees 0 ... 5        its queries go to rank 0, and are computed there

A block of queries is heavy where it sees more rows of another rank than it has itself; it travels where fewer rows do then. A
shard may begin within a block. Blocks that are whole see each other in one call (a local branch). What else a rank computes is
rectangles of the matrix of blocks, and with causality triangles within blocks that are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilkit.comm.plan.kept_rows import Message, SmallProblem
from dilkit.comm.plan.kinds.block_parts import Levels, Parts, Received, Split, Travels, Unit, side_of
from dilkit.comm.plan.kinds.exchange import BranchExchange, ExchangeCounts
from dilkit.comm.plan.kinds.rectangles import Bools, Rectangle, rectangles, runs
from dilkit.comm.plan.sharded_segments import ServedHead


@dataclass(frozen=True, eq=False)
class BlockExchange(BranchExchange):
    """What is sent of a branch of blocks. `layouts` are `(query heads or 1, blocks, blocks)`: of the heads that it serves."""

    layouts: Bools
    block_size: int

    @property
    def kind(self) -> str:
        return "blocks"

    def peers(self, rank: int) -> range:
        return self.held

    @cached_property
    def units(self) -> list[Unit]:
        """The layouts and who follows them, by key/value head."""
        if len(self.layouts) == 1:
            return [Unit(self.layouts[0], self.heads)]
        single = [ServedHead(head.kv_head, head.first + i, 1, 0) for head in self.heads for i in range(head.width)]
        return [Unit(layout, (head,)) for layout, head in zip(self.layouts, single, strict=True)]

    @cached_property
    def groups(self) -> list[list[int]]:
        """The units that see the same keys, those of one key/value head."""
        numbered = groupby(range(len(self.units)), key=lambda u: self.units[u].heads[0].kv_head)
        return [list(some) for _, some in numbered]

    @cached_property
    def parts(self) -> dict[int, Parts]:
        """By rank."""
        size, found = self.block_size, {}
        for rank in self.held:
            start, stop = self.shard(rank)
            ends = np.minimum(np.arange(start // size, -(-stop // size) + 1) * size, self.seq)
            edges = np.clip(ends, start, stop)
            found[rank] = Parts(start // size, edges, (edges[:-1] == ends[:-1]) & (edges[1:] == ends[1:]))
        return found

    def _seen(self, unit: Unit, rank: int, other: int) -> Bools:
        """Which parts of keys of `other` those of queries of `rank` see: all of their rows, beside what is local."""
        queries, keys = self.parts[rank], self.parts[other]
        seen = unit.layout[queries.blocks, keys.blocks]
        if other == rank:
            seen = seen & ~(queries.whole[:, None] & queries.whole)
            return np.tril(seen, -1) if self.is_causal else seen
        return np.zeros_like(seen) if self.is_causal and other > rank else seen

    def _split(self, rank: int, other: int) -> Split:
        """What queries of `rank` see of keys of `other`."""
        light = [self._seen(unit, rank, other) for unit in self.units]
        heavy = [np.zeros_like(seen) for seen in light]
        queries, keys = self.parts[rank].rows, self.parts[other].rows
        for group in self.groups if rank != other else ():
            many = {u: light[u] @ keys > queries * self._group_width(u) for u in group}
            rest = {u: light[u] & ~many[u][:, None] for u in group}
            before, after = (keys[_seen_by_any(seen[u] for u in group)].sum() for seen in (dict(enumerate(light)), rest))
            if after + sum(int(queries[many[u]].sum()) * self._group_width(u) for u in group) < before:
                for u in group:
                    light[u], heavy[u] = rest[u], light[u] & many[u][:, None]
        return Split(light, heavy)

    def _group_width(self, u: int) -> int:
        """The query heads of a unit that share keys."""
        return max(head.width for head in self.units[u].heads)

    @cached_property
    def travels(self) -> Travels:
        """What is sent from whom to whom."""
        found = Travels()
        for rank in self.held:
            for other in self.held:
                split, (rows, keys) = self._split(rank, other), (self.parts[rank].rows, self.parts[other].rows)
                for u, (light, heavy) in enumerate(zip(*split, strict=True)):
                    found.add(found.queries, rank, rank, u, _seen_by_any([light.T]))
                    found.add(found.queries, rank, other, u, _seen_by_any([heavy.T]))
                    found.pairs[rank] += self.units[u].width * int(rows @ (light @ keys))
                    found.pairs[other] += self.units[u].width * int(rows @ (heavy @ keys))
                for number, group in enumerate(self.groups):
                    found.add(found.keys, other, rank, number, _seen_by_any(split.light[u] for u in group))
                    found.add(found.keys, other, other, number, _seen_by_any(split.heavy[u] for u in group))
            self._add_triangles(found, rank)
        return found

    def _add_triangles(self, found: Travels, rank: int) -> None:
        rows = self.parts[rank].rows
        for number, group in enumerate(self.groups):
            for u in group:
                cut = self._cut(u, rank)
                found.add(found.queries, rank, rank, u, cut)
                found.add(found.keys, rank, rank, number, cut)
                found.pairs[rank] += self.units[u].width * int((rows * (rows + 1) // 2)[cut].sum())

    def _cut(self, u: int, rank: int) -> Bools:
        """With causality, the parts of blocks that see themselves and are not whole."""
        parts = self.parts[rank]
        return np.diagonal(self.units[u].layout)[parts.blocks] & ~parts.whole & self.is_causal

    def message(self, source: int, target: int) -> Message:
        travels, parts, nothing = self.travels, self.parts[source], np.zeros(0, np.bool_)
        queries = [
            self.kept(head, *parts.span(run))
            for u, unit in enumerate(self.units)
            for head in unit.heads
            for run in runs(travels.queries.get((source, target, u), nothing))
        ]
        shared = len(self.layouts) == 1
        keys = [
            self.kept(head, *parts.span(run))
            for number, head in enumerate(self.heads)
            for run in runs(travels.keys.get((source, target, 0 if shared else number), nothing))
        ]
        return Message(queries, keys)

    def problems(self, rank: int) -> Iterator[SmallProblem]:
        own, levels = Received.of(self.message(rank, rank)), Levels(self.parts)
        for u in range(len(self.units)):
            for part in np.flatnonzero(self._cut(u, rank)).tolist():
                square = Rectangle(part, part + 1, part, part + 1)
                yield from self._problems(u, square, (rank, own), (rank, own), True, levels)
        for other in self.held:
            mine, theirs = self._split(rank, other).light, self._split(other, rank).heavy
            foreign = own if other == rank else Received.of(self.message(other, rank))
            for u in range(len(self.units)):
                for rectangle in rectangles(mine[u]):
                    yield from self._problems(u, rectangle, (rank, own), (other, foreign), False, levels)
                for rectangle in rectangles(theirs[u]):
                    yield from self._problems(u, rectangle, (other, foreign), (rank, own), False, levels)

    def _problems(
        self,
        u: int,
        rectangle: Rectangle,
        queries: tuple[int, Received],
        keys: tuple[int, Received],
        is_causal: bool,
        levels: Levels,
    ) -> Iterator[SmallProblem]:
        """The problems of a rectangle of parts, one for each head of a unit; `queries` and `keys`: whose they are."""
        of_queries = self.parts[queries[0]].span(rectangle[:2])
        of_keys = self.parts[keys[0]].span(rectangle[2:])
        level = levels.next(u, self.units[u].heads[0].kv_head, queries[0], keys[0], rectangle)
        for head in self.units[u].heads:
            of_query = side_of(queries[1].queries[head.first], *of_queries)
            yield SmallProblem(of_query, side_of(keys[1].keys[head.kv_head], *of_keys), is_causal, None, level)

    @cached_property
    def counts(self) -> ExchangeCounts:
        size, travels = len(self.cuts) - 1, self.travels
        queries, keys = np.zeros((2, size, size), np.int64)
        for (source, target, u), chosen in travels.queries.items():
            queries[source, target] += self.units[u].width * self.parts[source].rows[chosen].sum()
        for (source, target, _), chosen in travels.keys.items():
            heads = len(self.heads) if len(self.layouts) == 1 else 1
            keys[source, target] += heads * self.parts[source].rows[chosen].sum()
        pairs: NDArray[Any] = np.array([travels.pairs.get(rank, 0) for rank in range(size)], object)
        found = [(x.sum(1) - x.diagonal(), x.sum(0) - x.diagonal(), x.sum(0)) for x in (queries, keys)]
        return ExchangeCounts(*found[0], *found[1], pairs)


def _seen_by_any(some: Iterable[Bools]) -> Bools:
    """Which columns of any of these matrices have a true element."""
    found: Bools = np.logical_or.reduce(np.concatenate(list(some)), 0)
    return found
