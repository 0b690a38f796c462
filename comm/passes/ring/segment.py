"""A segment of a branch with a ring schedule, seen from one of the ranks that hold it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from dilkit import plan as core_plan
from dilkit.comm.passes.kept_rows import HOST, kept_rows, row_numbers, row_run
from dilkit.comm.passes.problem_stacks import ProblemStack, RunsByRows, stack_problems, stack_rows
from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.plan.kept_rows import KeptRows, ProblemRows, SmallProblem
from dilkit.comm.plan.sharded_segments import ShardedSegment
from dilkit.environment import cache_bytes

SHARE = 0.25
"""Part of the pattern cache that the stacks of all ring branches of a plan may take; larger ones are made hop by hop."""
NUMBER_BYTES = 8
"""Bytes of a row number."""


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
        """Yield the problems of a hop: own queries with the keys of the member `hop` before."""
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


@dataclass(frozen=True)
class RingTables:
    """One segment of a ring as a rank computes with it: all that depends on plan, rank, batch and device alone.

    Attributes:
        segment: the segment, seen from this rank.
        queries: numbers of the rank's own rows of queries, `(batch * seq * heads)`.
        keys: numbers of its own rows of keys.
        sends: for each hop, True if the block that the rank computes with goes on to the next rank.
        receives: for each hop, the rows of keys in the block that arrives after it; None where none arrives.
        stacks: for each hop, the stacks to compute; empty where they are too large to be kept.
    """

    segment: RingSegment
    queries: Tensor
    keys: Tensor
    sends: tuple[bool, ...]
    receives: tuple[int | None, ...]
    stacks: tuple[tuple[ProblemStack, ...], ...]

    @classmethod
    def of(cls, segment: RingSegment, hops: int) -> RingTables:
        """The tables of a segment in a branch of so many hops, without stacks."""
        receives = tuple(segment.key_rows(-hop) if segment.reaches(-hop) else None for hop in range(1, hops + 1))
        sends = tuple(segment.sends_on(hop) for hop in range(hops))
        return cls(segment, segment.own_rows("q"), segment.own_rows("k"), sends, receives, ())

    @property
    def stack_bytes(self) -> int:
        """About the bytes of the stacks of all hops."""
        keys = [len(self.keys), *(rows for rows in self.receives if rows is not None)]
        return NUMBER_BYTES * (len(keys) * len(self.queries) + sum(keys))

    def with_stacks(self) -> RingTables:
        """Return these tables with the stacks of all hops."""
        reached = (True, *(rows is not None for rows in self.receives[:-1]))
        return replace(self, stacks=tuple(tuple(self.segment.stacks(hop)) if reached[hop] else () for hop in range(len(reached))))

    def stacks_at(self, hop: int) -> Iterable[ProblemStack]:
        """Return the problems of a hop, kept or made anew."""
        return self.stacks[hop] if self.stacks else self.segment.stacks(hop)

    @property
    def nbytes(self) -> int:
        """Bytes of all row numbers."""
        stacks = sum(stack.nbytes for of_hop in self.stacks for stack in of_hop)
        return self.queries.nbytes + self.keys.nbytes + stacks


@dataclass(frozen=True)
class RingBranch:
    """The segments of a ring branch that a rank holds rows of. All ranks take part in as many exchanges: `hops`."""

    plan: ExchangePlan
    tables: tuple[RingTables, ...]
    hops: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tables of all segments, and of the plan, which lives as long as they do."""
        return self.plan.nbytes + sum(one.nbytes for one in self.tables)


def ring_branch(plan: ExchangePlan, branch: int, rank: int, batch: int, device: torch.device, by_head: bool) -> RingBranch:
    """The tables of a ring branch for rows on `device`, made once and kept in the cache of patterns."""
    facts = plan, branch, rank, batch, device, by_head
    return core_plan.cached(("ring tables", *facts), _ring_branch, *facts)


def _ring_branch(plan: ExchangePlan, branch: int, rank: int, batch: int, device: torch.device, by_head: bool) -> RingBranch:
    hops = max(len(segment.ranks) for segment in plan.sharded_segments[branch])
    tables = [RingTables.of(segment, hops) for segment in ring_segments(plan, branch, rank, batch, device, by_head)]
    rings = sum(route.kind == "ring" for route in plan.routes)
    if rings * sum(one.stack_bytes for one in tables) <= SHARE * cache_bytes():
        tables = [one.with_stacks() for one in tables]
    return RingBranch(plan, tuple(tables), hops)


def ring_segments(
    plan: ExchangePlan, branch: int, rank: int, batch: int, device: torch.device = HOST, by_head: bool = False
) -> list[RingSegment]:
    """The segments of a ring branch that a rank holds rows of, for rows on `device`."""
    return [
        RingSegment(plan, segment, segment.index_of(rank), batch, device, by_head)
        for segment in plan.sharded_segments[branch]
        if segment.holds(rank)
    ]
