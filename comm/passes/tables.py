"""Index tables of one rank: which of its rows go to whom, and where in what it is sent each row that it computes with lies.

A message from one rank to another has, branch by branch, the rows of the queries, then of the keys, then of the values; each of
these batch by batch, segment by segment, head by head, in the order of the sequence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dilkit import plan as core_plan
from dilkit.comm.passes.calls import Call, SmallProblem, Starts, call_rows, make_calls
from dilkit.comm.passes.parts import Part, block_parts, expand, part_key, part_of, row_run
from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.plan.spread import Spread, whole_segments

HOST = torch.device("cpu")
"""Where tables are made."""


class Parcel(NamedTuple):
    """What one rank sends another for one branch: parts of queries, and of keys (and values)."""

    queries: list[Part]
    keys: list[Part]

    def rows(self) -> tuple[int, int]:
        """Rows of queries and of keys, for a batch of 1."""
        return sum(part.count * part.width for part in self.queries), sum(part.count for part in self.keys)


Parcels = dict[tuple[int, int], Parcel]
"""By (branch, other rank)."""


@dataclass(frozen=True)
class Layout:
    """Where in the messages to or from all ranks the rows of a parcel begin; the roles "q", "k", "v" tell what is in them."""

    counts: list[int]
    """Rows of each rank's message."""
    starts: dict[tuple[str, int, int], int]
    """By (role, branch, other rank)."""

    @classmethod
    def of(cls, parcels: Parcels, roles: str, world_size: int, batch: int) -> Layout:
        """The layout of messages that hold these roles."""
        counts, starts, at = [0] * world_size, {}, 0
        for branch, rank in sorted(parcels, key=lambda key: key[::-1]):
            queries, keys = parcels[branch, rank].rows()
            for role in roles:
                starts[role, branch, rank] = at
                rows = batch * (queries if role == "q" else keys)
                at += rows
                counts[rank] += rows
        return cls(counts, starts)


class Slice(NamedTuple):
    """Rows of this rank, as `(batch * seq * heads)` numbers, that lie in a message at `start .. start + len(rows) - 1`."""

    branch: int
    start: int
    rows: Tensor

    def to(self, device: torch.device) -> Slice:
        return self._replace(rows=self.rows.to(device))


@dataclass(frozen=True)
class Landing:
    """Rows of this rank that something comes back for, each once, and for each slice of what comes back: which of them."""

    rows: Tensor
    slices: list[Slice]

    @classmethod
    def of(cls, slices: list[Slice]) -> Landing:
        """`slices` with rows numbered among those of all slices."""
        every = torch.cat([s.rows for s in slices]) if slices else torch.empty(0, dtype=torch.int64)
        rows = torch.unique(every)
        return cls(rows, [s._replace(rows=torch.searchsorted(rows, s.rows)) for s in slices])

    def to(self, device: torch.device) -> Landing:
        return Landing(self.rows.to(device), [s.to(device) for s in self.slices])


@dataclass(frozen=True)
class Tables:
    """All of it for one rank, batch size and device. `sent` and `received`: layouts by roles, "qkv", "q" and "k"."""

    sent: dict[str, Layout]
    received: dict[str, Layout]
    packed: dict[str, list[Slice]]
    """What is sent: "q", "k", "v" in messages "qkv", "qq" in messages of queries alone, "kk" in messages of keys alone."""
    results: Landing
    """What comes back for the queries, in messages "q", branch by branch."""
    gradients: dict[str, Landing]
    """By role: what comes back in messages "qkv", branch by branch."""
    calls: tuple[Call, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all row numbers."""
        landings = (self.results, *self.gradients.values())
        slices = [s for some in (*self.packed.values(), *(landing.slices for landing in landings)) for s in some]
        tensors = [landing.rows for landing in landings] + [s.rows for s in slices]
        return sum(x.nbytes for x in (*tensors, *(x for call in self.calls for x in call.tables.values())))

    def to(self, device: torch.device) -> Tables:
        """The same for rows on `device`."""
        return replace(
            self,
            packed={roles: [s.to(device) for s in slices] for roles, slices in self.packed.items()},
            results=self.results.to(device),
            gradients={role: landing.to(device) for role, landing in self.gradients.items()},
            calls=tuple(call.to(device) for call in self.calls),
        )


def tables_of(plan: ExchangePlan, rank: int, batch: int, device: torch.device = HOST) -> Tables:
    """The tables of a rank, for rows on `device`, made once and kept in the cache of plans."""
    name = ("exchange tables", plan, rank, batch)
    if device.type == HOST.type:
        return core_plan.cached(name, lambda: _Maker(plan, rank, batch).tables())
    return core_plan.cached((*name, device), lambda: tables_of(plan, rank, batch).to(device))


class _Maker:
    """What the making of tables shares."""

    def __init__(self, plan: ExchangePlan, rank: int, batch: int) -> None:
        self.plan, self.rank, self.batch = plan, rank, batch
        self.rows = batch * len(plan.positions(rank)) * plan.heads
        self.outgoing, self.incoming = self._outgoing(), self._incoming()

    def tables(self) -> Tables:
        size, batch = self.plan.world_size, self.batch
        self.sent = {roles: Layout.of(self.outgoing, roles, size, batch) for roles in ("qkv", "q", "k")}
        self.received = {roles: Layout.of(self.incoming, roles, size, batch) for roles in ("qkv", "q", "k")}
        packed = {role: list(self._slices(role, "qkv")) for role in "qkv"}
        packed |= {role * 2: list(self._slices(role, role)) for role in "qk"}
        results = Landing.of(packed["qq"])
        gradients = {role: Landing.of(packed[role]) for role in "qkv"}
        # One problem a call where bits must be the same for every world size: a backend's may depend on what else is in a call.
        most_rows = call_rows(self.rows) if self.plan.fuse_branches else 0
        calls = tuple(make_calls(self._problems(), self._part_starts(), self.batch, most_rows))
        return Tables(self.sent, self.received, packed, results, gradients, calls)

    @cached_property
    def spreads(self) -> list[Spread]:
        """The segments that this rank has to do with, and whose rows are moved by `exchange` alone."""
        plan, found = self.plan, []
        for branch, (route, spreads) in enumerate(zip(plan.routes, plan.spreads, strict=True)):
            if not plan.fuse_branches:
                found += whole_segments(plan.moved, branch, plan.cuts, self.rank, plan.heads, plan.kv_heads, plan.is_causal)
            if route.kind != "ring":
                found += [s for s in spreads if s.ranks[0] <= self.rank <= s.ranks[-1]]
        return found

    def _outgoing(self) -> Parcels:
        """What this rank sends, itself included."""
        parcels: Parcels = defaultdict(lambda: Parcel([], []))
        for spread in self.spreads:
            me = self.rank - int(spread.ranks[0])
            block = int(spread.group_of[me])
            for head in range(len(spread.heads)):
                if part := part_of(spread, head, me):
                    parcels[spread.branch, int(spread.owners[block, head])].queries.append(part)
                    for other in range(block, len(spread.owners)) if spread.is_causal else range(len(spread.owners)):
                        parcels[spread.branch, int(spread.owners[other, head])].keys.append(part)
        return dict(parcels)

    def _incoming(self) -> Parcels:
        """What this rank is sent, by itself included."""
        parcels: Parcels = defaultdict(lambda: Parcel([], []))
        for spread in self.spreads:
            block = int(spread.group_of[self.rank - int(spread.ranks[0])])
            seen = int(spread.groups[spread.blocks_needed(block)[-1] + 1])
            for head in np.flatnonzero(spread.owners[block] == self.rank).tolist():
                for source in range(seen):
                    if part := part_of(spread, head, source):
                        parcel = parcels[spread.branch, int(spread.ranks[source])]
                        parcel.keys.append(part)
                        if spread.group_of[source] == block:
                            parcel.queries.append(part)
        return dict(parcels)

    def _slices(self, role: str, roles: str) -> Iterator[Slice]:
        for (branch, rank), parcel in sorted(self.outgoing.items()):
            parts = parcel.queries if role == "q" else parcel.keys
            if parts:
                rows = expand([row_run(self.plan, self.rank, part, role) for part in parts], self.batch)
                yield Slice(branch, self.sent[roles].starts[role, branch, rank], rows)

    def _problems(self) -> Iterator[SmallProblem]:
        for spread in self.spreads:
            block = int(spread.group_of[self.rank - int(spread.ranks[0])])
            for head in np.flatnonzero(spread.owners[block] == self.rank).tolist():
                pattern = self.plan.computed(spread.heads[head].kv_head)
                for other in spread.blocks_needed(block) if pattern else ():
                    causal = spread.is_causal and other == block
                    queries, keys = block_parts(spread, head, block), block_parts(spread, head, other)
                    yield SmallProblem(queries, keys, causal, pattern, other)

    def _part_starts(self) -> Starts:
        """Where the rows of each part lie in what this rank is sent, for each kind of messages."""
        found: Starts = {name: {} for name in ("q", "k", "v", "qq", "kk")}
        for (branch, rank), parcel in self.incoming.items():
            totals = parcel.rows()
            for name, roles in (("q", "qkv"), ("k", "qkv"), ("v", "qkv"), ("qq", "q"), ("kk", "k")):
                role = name[0]
                at = self.received[roles].starts[role, branch, rank]
                total = totals[role != "q"]
                for part in parcel.queries if role == "q" else parcel.keys:
                    rows = part.count * (part.width if role == "q" else 1)
                    found[name][part_key(part)] = (at, 1, 1, rows, total)
                    at += rows
        return found
