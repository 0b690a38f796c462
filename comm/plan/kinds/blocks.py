"""Block lists over ranks: a rank is sent the blocks of keys that its own blocks of queries see.

    rank              |------- 0 -------|------- 1 -------|
    blocks            |  0  |  1  |  2  |  3  |  4  |  5  |
    queries of rank 1                   light: sees 0, 3, 5        block 0 of keys and values goes to rank 1
    queries of rank 1                   heavy: sees 0 ... 5        its queries go to rank 0, and are computed there

A block of queries is heavy where it sees more rows of another rank than it has itself; it travels where fewer rows do then. A
shard may begin within a block. Blocks that are whole see each other in one call (a local branch), and what else a rank computes
is another. With causality, what blocks that are cut see of themselves are triangles. All of this follows from runs of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dilkit.comm.plan.kept_rows import Message, SlotProblem, SmallProblem
from dilkit.comm.plan.kinds.block_problems import BlockProblems
from dilkit.comm.plan.kinds.exchange import BranchExchange, ExchangeCounts
from dilkit.comm.plan.kinds.part_runs import PartRuns, Parts, exactly_summed, summed, union
from dilkit.comm.plan.kinds.seen_blocks import Division, SeenRuns, cut_diagonal, seen_runs
from dilkit.comm.plan.local_branches import LocalBranch
from dilkit.comm.plan.sharded_segments import IntArray, ServedHead
from dilkit.pattern import BlockLayout, BlockSparse
from dilkit.pattern.lowering import Runs

HeadSets = list[tuple[ServedHead, ...]]


class Travels(NamedTuple):
    """Which parts go from whom to whom, labelled by source, target, and unit (queries) or key group."""

    queries: PartRuns
    keys: PartRuns


@dataclass(frozen=True, eq=False)
class BlockExchange(BranchExchange):
    """What is sent of a branch of blocks. `forms`: one for each query head served, or one for all.

    `model_heads`: the numbers in the whole model of the query heads at hand, and how many it has.
    """

    forms: tuple[Runs, ...]
    model_heads: tuple[range, int]

    @property
    def kind(self) -> str:
        return "blocks"

    @cached_property
    def units(self) -> HeadSets:
        """The heads that follow each matrix: all, or a single query head."""
        if len(self.forms) == 1:
            return [self.heads]
        return [(ServedHead(h.kv_head, h.first + i, 1, 0),) for h in self.heads for i in range(h.width)]

    @cached_property
    def key_groups(self) -> HeadSets:
        """The key/value heads whose keys are seen by the same units: all, or one."""
        return [self.heads] if len(self.forms) == 1 else [(head,) for head in self.heads]

    @cached_property
    def group(self) -> IntArray:
        """The key group of each unit."""
        of_kv_head = {head.kv_head: at for at, heads in enumerate(self.key_groups) for head in heads}
        return np.array([of_kv_head[heads[0].kv_head] if len(self.units) > 1 else 0 for heads in self.units], np.int64)

    @cached_property
    def parts(self) -> Parts:
        """Those of all ranks."""
        return Parts.of(self.cuts, self.block_size)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
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
        return LocalBranch(first * size, min(last * size, self.seq), BlockSparse(layout, size, self.branch.heads))

    @cached_property
    def division(self) -> Division:
        """What is seen beside what is local and the triangles, and where it is computed."""
        lines = seen_runs(self._layout_runs, self.parts, self.is_causal)
        widths = np.array([max(head.width for head in heads) for heads in self.units], np.int64)
        return Division(lines, self.parts, self.group, widths)

    @cached_property
    def _layout_runs(self) -> IntArray:
        """`(n, 4)`: unit, block of queries, and the blocks of keys from one to before another, of those of the sequence."""
        blocks, found = -(-self.seq // self.block_size), []
        for unit, form in enumerate(self.forms):
            block = np.repeat(np.arange(len(form.queries.stop)), form.queries.runs)
            first, last = np.minimum(-(-form.queries.columns.T // self.block_size), blocks)
            runs = np.stack((np.full(len(block), unit), block, first, last), axis=1)
            found.append(runs[(block < blocks) & (first < last)])
        return np.concatenate(found)

    @cached_property
    def triangles(self) -> SeenRuns:
        """With causality, the parts of blocks that are not whole and see themselves."""
        lines = cut_diagonal(self._layout_runs, self.parts)
        return lines if self.is_causal else lines[:0]

    def _labels(self, source: IntArray, target: IntArray, number: IntArray, of: HeadSets) -> IntArray:
        labels: IntArray = (source * self.world_size + target) * len(of) + number
        return labels

    @cached_property
    def travels(self) -> Travels:
        """What is sent from whom to whom, or stays to be computed with."""
        queries, keys = [], []
        for lines, at in ((self.division.lines, self.division.computed_at), (self.triangles, self.triangles.keys_of)):
            of_query = self._labels(self.parts.rank[lines.query], at, lines.unit, self.units)
            of_keys = self._labels(lines.keys_of, at, self.group[lines.unit], self.key_groups)
            queries.append(PartRuns(of_query, lines.query, lines.query + 1))
            keys.append(PartRuns(of_keys, lines.start, lines.stop))
        return Travels(union(*queries), union(*keys))

    @cached_property
    def _met(self) -> dict[int, set[int]]:
        """By rank, those to whom it sends something, or who send it something."""
        queries, keys = self.travels
        pairs = np.unique(np.concatenate((queries.label // len(self.units), keys.label // len(self.key_groups))))
        met: dict[int, set[int]] = {rank: {rank} for rank in self.held}
        for source, target in zip(*(x.tolist() for x in np.divmod(pairs, self.world_size)), strict=True):
            met[source].add(target)
            met[target].add(source)
        return met

    def peers(self, rank: int) -> list[int]:
        return sorted(self._met[rank])

    def message(self, source: int, target: int) -> Message:
        def kept(runs: PartRuns, of: HeadSets) -> list[Any]:
            first = (source * self.world_size + target) * len(of)
            edges = self.parts.edges
            by_heads = ((heads, runs.of_labels(first + at, first + at + 1)) for at, heads in enumerate(of))
            spans = ((heads, edges[some.start].tolist(), edges[some.stop].tolist()) for heads, some in by_heads)
            return [
                self.kept(head, *span)
                for heads, starts, stops in spans
                for head in heads
                for span in zip(starts, stops, strict=True)
            ]

        return Message(kept(self.travels.queries, self.units), kept(self.travels.keys, self.key_groups))

    def problems(self, rank: int) -> Iterator[SmallProblem]:
        return BlockProblems.of(self, rank).at_equal_steps()

    def in_slots(self, rank: int) -> Iterator[SlotProblem | SmallProblem]:
        return BlockProblems.of(self, rank).in_slots()

    @cached_property
    def counts(self) -> ExchangeCounts:
        queries = self._sent(self.travels.queries, self.units, True)
        keys = self._sent(self.travels.keys, self.key_groups, False)
        return ExchangeCounts(*queries, *keys, self._pairs())

    def _sent(self, runs: PartRuns, of: HeadSets, by_width: bool) -> tuple[IntArray, IntArray, IntArray]:
        """Rows that each rank sends, that it receives, and with its own that it computes with."""
        heads = np.array([sum(head.width if by_width else 1 for head in some) for some in of], np.int64)
        pair, number = np.divmod(runs.label, len(of))
        source, target = np.divmod(pair, self.world_size)
        rows, size = runs.rows(self.parts) * heads[number], self.world_size
        away = rows * (source != target)
        return summed(source, away, size), summed(target, away, size), summed(target, rows, size)

    def _pairs(self) -> NDArray[Any]:
        """Pairs of each rank."""
        lines, parts, triangles = self.division.lines, self.parts, self.triangles
        rows = parts.rows[triangles.query]
        widths = np.array([sum(head.width for head in heads) for heads in self.units], object)
        labels = self.division.computed_at * len(widths) + lines.unit, triangles.keys_of * len(widths) + triangles.unit
        pairs = parts.rows[lines.query] * lines.key_rows(parts), rows * (rows + 1) // 2
        by_unit = exactly_summed(np.concatenate(labels), np.concatenate(pairs), self.world_size * len(widths))
        total: NDArray[Any] = by_unit.reshape(self.world_size, len(widths)) @ widths
        return total

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.cuts) - 1
