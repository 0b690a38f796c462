"""A segment of a branch with a ring schedule, seen from one of the ranks that hold it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dilkit.comm.passes.kept_rows import HOST, kept_rows, row_numbers, row_run
from dilkit.comm.passes.problem_stacks import ProblemStack, RunsByRows, stack_problems, stack_rows
from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.plan.kept_rows import KeptRows, ProblemRows, SmallProblem
from dilkit.comm.plan.sharded_segments import ShardedSegment


@dataclass(frozen=True)
class RingSegment:
    """One segment of a ring, seen from its member number `member`: the rank `segment.ranks[member]`."""

    plan: ExchangePlan
    segment: ShardedSegment
    member: int
    batch: int
    device: torch.device = HOST
    by_head: bool = False
    """Whether no stack has problems of different heads."""

    @property
    def size(self) -> int:
        """The number of ranks that hold the segment."""
        return len(self.segment.ranks)

    @property
    def rank(self) -> int:
        """The rank of this member."""
        return self.neighbour(0)

    def neighbour(self, distance: int) -> int:
        """The rank of the member `distance` after this one."""
        return int(self.segment.ranks[(self.member + distance) % self.size])

    def reaches(self, distance: int) -> bool:
        """Whether blocks go between this member and the one `distance` after it (before it, if negative)."""
        if self.segment.is_causal:
            return 0 <= self.member + distance < self.size
        return abs(distance) < self.size

    def sends_on(self, hop: int) -> bool:
        """Whether the next member needs the block that this one computes with at a hop."""
        return self.reaches(1) if self.segment.is_causal else hop + 1 < self.size

    def kept(self, distance: int) -> list[KeptRows]:
        """The rows that the member `distance` after this one holds, head by head."""
        member = (self.member + distance) % self.size
        rows_by_head = (kept_rows(self.segment, head, member) for head in range(len(self.segment.heads)))
        return [rows for rows in rows_by_head if rows]

    def key_rows(self, distance: int) -> int:
        """How many rows of keys the member `distance` after this one holds."""
        return self.batch * sum(rows.positions for rows in self.kept(distance))

    def own_rows(self, role: str) -> Tensor:
        """The rows of queries ("q") or keys ("k") that this member holds, as `(batch * seq * heads)` numbers."""
        runs = [row_run(self.plan, self.rank, rows, role) for rows in self.kept(0)]
        return row_numbers(runs, self.batch).to(self.device)

    def stacks(self, hop: int) -> Iterator[ProblemStack]:
        """What is computed at a hop: own queries with the keys of the member `hop` before."""
        queries, keys = self.kept(0), {rows.kv_head: rows for rows in self.kept(-hop)}
        causal = self.segment.is_causal and hop == 0
        pairs = [(rows, keys[rows.kv_head]) for rows in queries if rows.kv_head in keys]
        problems = [SmallProblem(ProblemRows.whole([rows]), ProblemRows.whole([seen]), causal) for rows, seen in pairs]
        query_runs = _runs((rows, rows.width) for rows in queries)
        key_runs = _runs((rows, 1) for rows in keys.values())
        runs = {"q": query_runs, "qq": query_runs, "k": key_runs, "v": key_runs, "kk": key_runs}
        most_rows = stack_rows(self.batch * len(self.plan.positions(self.rank)) * self.plan.heads)
        return (stack.to(self.device) for stack in stack_problems(problems, runs, self.batch, most_rows, self.by_head))


def _runs(widths: Iterable[tuple[KeptRows, int]]) -> RunsByRows:
    """Where kept rows lie, `width` rows a position, in a table that has them one after the other, batch by batch."""
    kept = list(widths)
    *starts, total = accumulate((rows.positions * width for rows, width in kept), initial=0)
    return {rows: (at, width, rows.positions, width, total) for (rows, width), at in zip(kept, starts, strict=True)}


def ring_segments(
    plan: ExchangePlan, branch: int, rank: int, batch: int, device: torch.device = HOST, by_head: bool = False
) -> list[RingSegment]:
    """The segments of a ring branch that a rank holds rows of, for rows on `device`."""
    return [
        RingSegment(plan, segment, segment.index_of(rank), batch, device, by_head)
        for segment in plan.sharded_segments[branch]
        if segment.holds(rank)
    ]


def hops(plan: ExchangePlan, branch: int) -> int:
    """Hops of the segment that most ranks hold: all ranks take part in as many exchanges."""
    return max(len(segment.ranks) for segment in plan.sharded_segments[branch])
