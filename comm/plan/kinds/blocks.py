"""Block lists over ranks: a rank is sent the blocks of keys that its own blocks of queries see.

    rank              |------- 0 -------|------- 1 -------|
    blocks            |  0  |  1  |  2  |  3  |  4  |  5  |
    queries of rank 1                   light: sees 0, 3, 5        block 0 of keys and values goes to rank 1
    queries of rank 1                   heavy: sees 0 ... 5        its queries go to rank 0, and are computed there

A block of queries is heavy where it sees more rows of another rank than it has itself; it travels where fewer rows do then. A
shard may begin within a block. Blocks that are whole see each other in one call (a local branch), and what else a rank computes
is another. With causality, what blocks that are cut see of themselves are triangles. All of this follows from runs of blocks.

parts of queries    | 3 | 4 | 7 |                  in slots: one problem for all of them. Each part has a slot, with the
parts of keys       | 0 | 1 | 5 | 6 | 9 |          layout of what is seen among these parts
                                                   at equal steps: parts of queries that follow each other, and
                                                   parts of keys that do, where all see all
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from dilkit.comm.plan.exchange import BranchExchange, LocalBranch, Pairs, Sent
from dilkit.comm.plan.kinds.block_parts import (
    Bools,
    PartRuns,
    Parts,
    SeenRuns,
    cut_diagonal,
    exactly_summed,
    parts_of,
    run_rows,
    seen_runs,
    summed,
    union,
)
from dilkit.comm.plan.messages import HeadRows, IntArray, Message, RowSpan, SharedRows, SmallProblem, by_head
from dilkit.comm.plan.shardable_forms import ServedHead
from dilkit.pattern import BlockLayout, BlockSparse, Pattern
from dilkit.pattern.lowering import Runs

HeadSets = list[tuple[ServedHead, ...]]
Received = tuple[dict[tuple[int, int], list[HeadRows]], dict[tuple[int, int], list[HeadRows]]]
"""Rows by rank of origin and head, ascending: of queries by the first query head, of keys by the key/value head."""


@dataclass(frozen=True, eq=False)
class BlockExchange(BranchExchange):
    """The messages of a branch of blocks.

    `forms`: one for each query head, or for all. `model_heads`: their numbers, of how many.
    """

    kind = "blocks"
    forms: tuple[Runs, ...]
    model_heads: tuple[range, int]

    @cached_property
    def units(self) -> HeadSets:
        """The heads that follow each matrix: all, or a single query head."""
        if len(self.forms) == 1:
            return [self.heads]
        return [(ServedHead(h.kv_head, h.first + i, 1),) for h in self.heads for i in range(h.width)]

    @cached_property
    def key_groups(self) -> HeadSets:
        """The key/value heads whose keys are seen by the same units: all, or one."""
        return [self.heads] if len(self.forms) == 1 else [(head,) for head in self.heads]

    @cached_property
    def group(self) -> IntArray:
        """For each unit, the number of its group of key heads in `key_groups`."""
        by_kv_head = {head.kv_head: number for number, heads in enumerate(self.key_groups) for head in heads}
        return np.array([by_kv_head[heads[0].kv_head] if len(self.units) > 1 else 0 for heads in self.units], np.int64)

    @cached_property
    def parts(self) -> Parts:
        return parts_of(self.cuts, self.block_size)

    @property
    def block_size(self) -> int:
        return self.forms[0].block

    def local(self, rank: int) -> LocalBranch | None:
        (start, stop), size = self.shard(rank), self.block_size
        first, last = -(-start // size), -(-stop // size) if stop == self.seq else stop // size
        if first >= last:
            return None
        runs = self._layout_runs[(first <= self._layout_runs[:, 1]) & (self._layout_runs[:, 1] < last)]
        runs = np.concatenate((runs[:, :1], np.clip(runs[:, 1:], first, last) - first), axis=1)
        runs, heads = runs[runs[:, 2] < runs[:, 3]], 1
        if len(self.forms) > 1:
            in_model, heads = self.model_heads
            runs[:, 0] += in_model[self.forms[0].heads[0]]
        layout = BlockLayout.of_runs(runs, heads, last - first)
        return first * size, min(last * size, self.seq), BlockSparse(layout, size, self.branch.heads)

    @cached_property
    def _layout_runs(self) -> IntArray:
        """`(n, 4)`: unit, block of queries, and the blocks of keys from one to before another, of those of the sequence."""
        blocks, runs = -(-self.seq // self.block_size), []
        for unit, form in enumerate(self.forms):
            block = np.repeat(np.arange(len(form.queries.stop)), form.queries.runs)
            first, last = np.minimum(-(-form.queries.columns.T // self.block_size), blocks)
            some = np.stack((np.full(len(block), unit), block, first, last), axis=1)
            runs.append(some[(block < blocks) & (first < last)])
        return np.concatenate(runs)

    @cached_property
    def lines(self) -> SeenRuns:
        """The runs of parts that are seen beside those of local branches and triangles."""
        return seen_runs(self._layout_runs, self.parts, self.is_causal)

    @cached_property
    def triangles(self) -> SeenRuns:
        """With causality, the parts of blocks that are not whole and see themselves."""
        lines = cut_diagonal(self._layout_runs, self.parts)
        return lines if self.is_causal else lines.where(slice(0))

    @cached_property
    def computed_at(self) -> IntArray:
        """The rank that computes each of the lines: that of the keys where the queries are heavy, else that of the queries."""
        return np.where(self._heavy, self.lines.keys_of, self.parts.rank[self.lines.query])

    @property
    def _heavy(self) -> Bools:
        """The lines whose queries see more rows of another rank than they have, if that pays for the ranks."""
        lines, parts, size = self.lines, self.parts, self.world_size
        widths = np.array([max(head.width for head in heads) for heads in self.units], np.int64)
        foreign = lines.keys_of != parts.rank[lines.query]
        _, of_query, inverse = np.unique(
            (lines.unit * len(parts.block) + lines.query) * size + lines.keys_of, return_index=True, return_inverse=True
        )
        rows = parts.rows[lines.query] * widths[lines.unit]
        many = foreign & (summed(inverse, lines.key_rows(parts), len(of_query))[inverse] > rows)
        _, pair = np.unique((self.group[lines.unit] * size + parts.rank[lines.query]) * size + lines.keys_of, return_inverse=True)
        pairs = int(pair.max(initial=-1)) + 1

        def key_rows(chosen: Bools) -> IntArray:
            runs = union((pair[chosen], lines.start[chosen], lines.stop[chosen]))
            return summed(runs[0], run_rows(runs, parts), pairs)

        once = many[of_query]
        moved = summed(pair[of_query][once], rows[of_query][once], pairs)
        heavy: Bools = many & (key_rows(foreign & ~many) + moved < key_rows(foreign))[pair]
        return heavy

    @cached_property
    def _travels(self) -> tuple[PartRuns, PartRuns]:
        """The parts of queries and of keys that are sent, or stay to be computed with: by source, target, and unit or group."""
        queries, keys, world_size = [], [], self.world_size
        for lines, target in ((self.lines, self.computed_at), (self.triangles, self.triangles.keys_of)):
            of_query = (self.parts.rank[lines.query] * world_size + target) * len(self.units) + lines.unit
            of_keys = (lines.keys_of * world_size + target) * len(self.key_groups) + self.group[lines.unit]
            queries.append((of_query, lines.query, lines.query + 1))
            keys.append((of_keys, lines.start, lines.stop))
        return union(*queries), union(*keys)

    @cached_property
    def _met(self) -> dict[int, set[int]]:
        (queries, *_), (keys, *_) = self._travels
        pairs = np.unique(np.concatenate((queries // len(self.units), keys // len(self.key_groups))))
        met: dict[int, set[int]] = {rank: {rank} for rank in self.held}
        for source, target in zip(*(x.tolist() for x in np.divmod(pairs, self.world_size)), strict=True):
            met[source].add(target)
            met[target].add(source)
        return met

    def peers(self, rank: int) -> list[int]:
        return sorted(self._met[rank])

    def message(self, source: int, target: int) -> Message:
        def shared(runs: PartRuns, sets: HeadSets) -> list[SharedRows]:
            first = (source * self.world_size + target) * len(sets)
            low, high = np.searchsorted(runs[0], (first, first + len(sets))).tolist()
            label, start, stop = (x[low:high] for x in runs)
            starts, stops = self.parts.edges[start], self.parts.edges[stop]
            return [
                (sets[number], begin, 1, end - begin)
                for number, begin, end in zip((label - first).tolist(), starts.tolist(), stops.tolist(), strict=True)
            ]

        queries, keys = self._travels
        return shared(queries, self.units), shared(keys, self.key_groups)

    def messages(self) -> Iterator[Sent]:
        for role, (runs, sets) in enumerate(zip(self._travels, (self.units, self.key_groups), strict=True)):
            heads = np.array([sum(1 if role else head.width for head in some) for some in sets], np.int64)
            pair, number = np.divmod(runs[0], len(sets))
            rows = run_rows(runs, self.parts) * heads[number]
            yield *np.divmod(pair, self.world_size), *((0 * rows, rows) if role else (rows, 0 * rows))

    @cached_property
    def pairs(self) -> Pairs:
        lines, parts, triangles = self.lines, self.parts, self.triangles
        rows = parts.rows[triangles.query]
        widths = np.array([sum(head.width for head in heads) for heads in self.units], object)
        labels = self.computed_at * len(widths) + lines.unit, triangles.keys_of * len(widths) + triangles.unit
        pairs = parts.rows[lines.query] * lines.key_rows(parts), rows * (rows + 1) // 2
        by_unit = exactly_summed(np.concatenate(labels), np.concatenate(pairs), self.world_size * len(widths))
        total: Pairs = by_unit.reshape(self.world_size, len(widths)) @ widths
        return total

    def in_slots(self, rank: int) -> Iterator[SmallProblem]:
        side = self._side_of(rank)
        yield from self._triangles(rank, side)
        here, rows = self.lines.where(self.computed_at == rank), self.parts.rows
        for unit in range(len(self.units)):
            lines = here.where(here.unit == unit)
            if not len(lines.unit):
                continue
            queries = union((self.parts.rank[lines.query], lines.query, lines.query + 1))
            keys = union((lines.keys_of, lines.start, lines.stop))
            parts = [np.concatenate([np.arange(*run) for run in zip(*runs[1:], strict=True)]) for runs in (queries, keys)]
            slot, slots = max(int(rows[some].max()) for some in parts), max(map(len, parts))
            numbers = np.searchsorted(parts[0], lines.query)
            first, last = (np.searchsorted(parts[1], ends) for ends in (lines.start, lines.stop - 1))
            runs = np.stack((0 * numbers, numbers, first, last + 1), axis=1)
            pattern = Pattern.of(BlockSparse(BlockLayout.of_runs(runs, 1, slots), slot))
            for head in self.units[unit]:
                query_side = tuple(side(0, head, span) for span in _filled(queries, rows, slot))
                key_side = tuple(side(1, head, span) for span in _filled(keys, rows, slot))
                yield SmallProblem(query_side, key_side, False, pattern, unit, slot=slot)

    def problems(self, rank: int) -> Iterator[SmallProblem]:
        side = self._side_of(rank)
        yield from self._triangles(rank, side)
        levels: dict[tuple[str, int], IntArray] = {}
        for unit, queries, keys in self._rectangles(rank):
            level = self._level(levels, unit, queries, keys)
            for head in self.units[unit]:
                yield SmallProblem((side(0, head, queries),), (side(1, head, keys),), False, None, level)

    def _triangles(self, rank: int, side: Callable[[int, ServedHead, tuple[int, int]], RowSpan]) -> Iterator[SmallProblem]:
        """Yield what parts of a rank see of themselves with causality."""
        lines = self.triangles.where(self.triangles.keys_of == rank)
        for unit, part in zip(lines.unit.tolist(), lines.query.tolist(), strict=True):
            for head in self.units[unit]:
                queries, keys = (side(role, head, (part, part + 1)) for role in (0, 1))
                yield SmallProblem((queries,), (keys,), True, None, unit)

    def _rectangles(self, rank: int) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
        """Yield unit, and the parts of queries and of keys from one to before another, those of most parts of queries first."""
        lines, ranks = self.lines.where(self.computed_at == rank), self.parts.rank
        lines = lines.where(np.lexsort((lines.query, lines.stop, lines.start, ranks[lines.query], lines.unit)))
        alike = np.stack((lines.unit, ranks[lines.query], lines.start, lines.stop, lines.query - np.arange(len(lines.unit))))
        first = np.flatnonzero((np.diff(alike, axis=1, prepend=-1) != 0).any(0))
        count = np.diff(first, append=len(lines.unit))
        for line, rows in sorted(zip(first.tolist(), count.tolist(), strict=True), key=lambda one: -one[1]):
            start = int(lines.query[line])
            yield int(lines.unit[line]), (start, start + rows), (int(lines.start[line]), int(lines.stop[line]))

    def _level(self, levels: dict[tuple[str, int], IntArray], unit: int, queries: tuple[int, int], keys: tuple[int, int]) -> int:
        """Return a number for a rectangle that differs from those with which it has queries or keys in common."""
        used = []
        for name, number, span in (("queries", unit, queries), ("keys", int(self.group[unit]), keys)):
            of_parts = levels.setdefault((name, number), np.zeros(len(self.parts.block), np.int64))
            used.append(of_parts[slice(*span)])
        level = int(max(some.max() for some in used))
        for some in used:
            some[:] = level + 1
        return level + len(self.units)  # triangles have the numbers before

    def _side_of(self, rank: int) -> Callable[[int, ServedHead, tuple[int, int]], RowSpan]:
        """Return a function of a role (0: queries, 1: keys), a head and parts: their rows among those that a rank receives."""
        received: Received = ({}, {})
        for source in self.peers(rank):
            queries, keys = (by_head(self.number, rows) for rows in self.message(source, rank))
            for rows in queries:
                received[0].setdefault((source, rows.head.first), []).append(rows)
            for rows in keys:
                received[1].setdefault((source, rows.head.kv_head), []).append(rows)

        def side(role: int, head: ServedHead, span: tuple[int, int]) -> RowSpan:
            start, stop = self.parts.edges[list(span)].tolist()
            runs = received[role][int(self.parts.rank[span[0]]), head.kv_head if role else head.first]
            rows = runs[bisect_right(runs, start, key=lambda rows: rows.start) - 1]
            return RowSpan(rows, start - rows.start, 1, stop - start)

        return side


def _filled(runs: PartRuns, rows: IntArray, slot: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of parts, split after each part that has fewer than `slot` rows."""
    for start, stop in zip(runs[1].tolist(), runs[2].tolist(), strict=True):
        ends = np.flatnonzero(rows[start : stop - 1] < slot) + start + 1
        yield from pairwise([start, *ends.tolist(), stop])
