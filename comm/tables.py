"""Index tables of one rank: which of its rows go to whom, and where in what it is sent each row that it computes with lies.

A message from one rank to another has, branch by branch, the rows of the queries, then of the keys, then of the values; each of
these batch by batch, segment by segment, head by head, in the order of the sequence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilkit import plan as core_plan
from dilkit.comm import _runs
from dilkit.comm.plan import ExchangePlan
from dilkit.comm.spread import Spread, whole_segments

Run = tuple[int, int, int, int, int]
"""`(start, step, count, width, batch_step)`: see `dilkit.comm._runs.expand`."""


class Part(NamedTuple):
    """Rows `first .. last - 1`, counted among those that a head keeps of a segment, out of one rank's shard."""

    spread: Spread
    head: int
    first: int
    last: int

    @property
    def count(self) -> int:
        return self.last - self.first

    @property
    def width(self) -> int:
        """Query heads."""
        return self.spread.heads[self.head].width


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
    """Where in the messages to or from all ranks the rows of a parcel begin. `roles` out of "q", "k", "v" tells what is in them."""

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


@dataclass(frozen=True)
class Call:
    """Equal small problems of one branch that a rank computes: `rows` queries and keys each, `width` query heads on one.

    `queries` `(batch * problems * rows * width,)` and `keys` `(batch * problems * rows,)` tell where in what this rank was sent
    they lie (`results`: the same for messages of queries alone; `flags`: for messages of keys alone). Where a problem has fewer
    queries or keys than `rows`, others stand in, which `real_queries` and `real_keys` exclude; None: all are real.
    """

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


@dataclass(frozen=True)
class Tables:
    """All of it for one rank and batch size. `sent` and `received`: layouts by roles, "qkv", "q" and "k"."""

    sent: dict[str, Layout]
    received: dict[str, Layout]
    packed: dict[str, list[Slice]]
    """By role: what is sent, in messages "qkv"."""
    returned: list[Slice]
    """What comes back for the queries, in messages "q", branch by branch."""
    calls: tuple[Call, ...]
    nbytes: int


def tables_of(plan: ExchangePlan, rank: int, batch: int) -> Tables:
    """The tables of a rank, made once and kept in the cache of plans."""
    return core_plan.cached(("exchange tables", plan, rank, batch), lambda: _Maker(plan, rank, batch).tables())


class _Maker:
    """What the making of tables shares."""

    def __init__(self, plan: ExchangePlan, rank: int, batch: int) -> None:
        self.plan, self.rank, self.batch = plan, rank, batch
        self.outgoing, self.incoming = self._outgoing(), self._incoming()

    def tables(self) -> Tables:
        size, batch = self.plan.world_size, self.batch
        self.sent = {roles: Layout.of(self.outgoing, roles, size, batch) for roles in ("qkv", "q", "k")}
        self.received = {roles: Layout.of(self.incoming, roles, size, batch) for roles in ("qkv", "q", "k")}
        packed = {role: list(self._slices(role, "qkv")) for role in "qkv"}
        returned = list(self._slices("q", "q"))
        calls = tuple(self._calls())
        tensors = [s.rows for s in (*packed["q"], *packed["k"])]
        tensors += [x for c in calls for x in (c.queries, c.keys, c.values, c.results, c.flags)]
        return Tables(self.sent, self.received, packed, returned, calls, sum(t.nbytes for t in tensors))

    @cached_property
    def spreads(self) -> list[Spread]:
        """The segments that this rank has to do with, and whose rows are moved by `exchange` alone."""
        plan, found = self.plan, []
        for branch, (route, spreads) in enumerate(zip(plan.routes, plan.spreads, strict=True)):
            if not plan.fuse_branches:
                found += whole_segments(plan.pattern, branch, plan.cuts, self.rank, plan.heads, plan.kv_heads, plan.is_causal)
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
                if part := _part(spread, head, me):
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
                    if part := _part(spread, head, source):
                        parcel = parcels[spread.branch, int(spread.ranks[source])]
                        parcel.keys.append(part)
                        if spread.group_of[source] == block:
                            parcel.queries.append(part)
        return dict(parcels)

    def _slices(self, role: str, roles: str) -> Iterator[Slice]:
        for (branch, rank), parcel in sorted(self.outgoing.items()):
            parts = parcel.queries if role == "q" else parcel.keys
            if parts:
                rows = self._expand([self._row_run(part, role) for part in parts])
                yield Slice(branch, self.sent[roles].starts[role, branch, rank], rows)

    def _row_run(self, part: Part, role: str) -> Run:
        """The rows of a part in this rank's tensors, as `(batch, seq, heads)` numbers."""
        spread, head = part.spread, part.spread.heads[part.head]
        start, stop = self.plan.cuts[self.rank : self.rank + 2]
        row = spread.start + head.offset + part.first * spread.rate - start
        heads = self.plan.heads if role == "q" else self.plan.kv_heads
        first, width = (head.first, head.width) if role == "q" else (head.kv_head, 1)
        return row * heads + first, spread.rate * heads, part.count, width, (stop - start) * heads

    def _expand(self, runs: Sequence[Run]) -> Tensor:
        table = np.array(runs, np.int64).reshape(-1, 5)
        rows: NDArray[np.int64] = np.empty(self.batch * int((table[:, 2] * table[:, 3]).sum()), np.int64)
        _runs.expand(rows, table, self.batch)
        return torch.from_numpy(rows)

    def _calls(self) -> Iterator[Call]:
        """The problems of this rank, equal ones together; in the order of branches, blocks and heads."""
        alike: dict[tuple[int, int, int, bool, bool], list[tuple[list[Part], list[Part]]]] = defaultdict(list)
        for spread in self.spreads:
            block = int(spread.group_of[self.rank - int(spread.ranks[0])])
            for head in np.flatnonzero(spread.owners[block] == self.rank).tolist():
                for other in spread.blocks_needed(block):
                    queries, keys = _block(spread, head, block), _block(spread, head, other)
                    rows = (sum(p.count for p in queries), sum(p.count for p in keys))
                    if min(rows):
                        causal = spread.is_causal and other == block
                        key = (spread.branch, max(rows), spread.heads[head].width, causal, rows[0] == rows[1])
                        alike[key].append((queries, keys))
        starts = self._part_starts()
        for (_, rows, width, causal, equal), problems in alike.items():
            yield self._call(rows, width, causal, equal, problems, starts)

    def _call(
        self,
        rows: int,
        width: int,
        is_causal: bool,
        equal: bool,
        problems: list[tuple[list[Part], list[Part]]],
        starts: dict[str, dict[tuple[int, int, int], Run]],
    ) -> Call:
        def where(role: str, at: int) -> Tensor:
            wide = width if role.startswith("q") else 1
            runs = []
            for problem in problems:
                found = [starts[role][_key(part)] for part in problem[at]]
                missing = rows - sum(part.count for part in problem[at])
                runs += found
                if missing:
                    runs.append((found[0][0], 0, missing, wide, found[0][4]))
            return self._expand(runs)

        def real(at: int, wide: int) -> Tensor | None:
            if equal:
                return None
            counts = torch.tensor([sum(part.count for part in problem[at]) for problem in problems])
            return (torch.arange(rows) < counts[:, None]).repeat(self.batch, 1).repeat_interleave(wide, 1).view(-1)

        return Call(
            rows, width, is_causal, where("q", 0), where("k", 1), where("v", 1), where("qq", 0), where("kk", 1),
            real(0, width), real(1, 1),
        )  # fmt: skip

    def _part_starts(self) -> dict[str, dict[tuple[int, int, int], Run]]:
        """Where the rows of each part lie in what this rank is sent, for each kind of messages."""
        found: dict[str, dict[tuple[int, int, int], Run]] = {name: {} for name in ("q", "k", "v", "qq", "kk")}
        for (branch, rank), parcel in self.incoming.items():
            totals = parcel.rows()
            for name, roles in (("q", "qkv"), ("k", "qkv"), ("v", "qkv"), ("qq", "q"), ("kk", "k")):
                role = name[0]
                at = self.received[roles].starts[role, branch, rank]
                total = totals[role != "q"]
                for part in parcel.queries if role == "q" else parcel.keys:
                    rows = part.count * (part.width if role == "q" else 1)
                    found[name][_key(part)] = (at, 1, 1, rows, total)
                    at += rows
        return found


def _part(spread: Spread, head: int, member: int) -> Part | None:
    """The rows of a head that a member of a spread holds; None if there are none."""
    first, last = spread.kept[member : member + 2, head].tolist()
    return Part(spread, head, first, last) if first < last else None


def _block(spread: Spread, head: int, block: int) -> list[Part]:
    """The rows of a head in a block, by member."""
    members = range(*spread.groups[block : block + 2].tolist())
    return [part for member in members if (part := _part(spread, head, member))]


def _key(part: Part) -> tuple[int, int, int]:
    return id(part.spread), part.head, part.first
