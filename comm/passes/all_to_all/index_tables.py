"""Index tables of one rank: which of its rows it sends to whom, and where the rows that it computes with lie in what it receives.

This is where a rank decides what to send: `_TableBuilder._outgoing` follows the exchange plan segment by segment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from dilkit import plan as core_plan
from dilkit.comm.passes.all_to_all.message_layout import MessageLayout, MessageSlice, ReturnTable
from dilkit.comm.passes.kept_rows import HOST, group_kept_rows, kept_rows, row_numbers, row_run
from dilkit.comm.passes.problem_stacks import ProblemStack, RunsByRole, stack_problems, stack_rows
from dilkit.comm.passes.slot_stacks import stack_slots
from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.plan.kept_rows import Message, Messages, ProblemRows, SlotProblem, SmallProblem
from dilkit.comm.plan.kinds.blocks import BlockExchange
from dilkit.comm.plan.kinds.exchange import BranchExchange
from dilkit.comm.plan.local_segments import local_segments
from dilkit.comm.plan.sharded_segments import ShardedSegment


@dataclass(frozen=True)
class IndexTables:
    """The index tables of one rank, batch size and device, for a round.

    `sent` and `received` are by roles: "qkv", "q", "k", and those of `returned`.
    """

    sent: dict[str, MessageLayout]
    received: dict[str, MessageLayout]
    packed: dict[str, list[MessageSlice]]
    """What is sent: "q", "k", "v" in messages "qkv", "qq" in messages of queries alone, "kk" in messages of keys alone."""
    results: ReturnTable
    """What is returned for the queries, in messages "q", branch by branch."""
    gradients: dict[str, ReturnTable]
    """By role: what is returned for the rows of which gradients are asked for, branch by branch."""
    stacks: tuple[ProblemStack, ...]
    returned: str
    """The roles of which gradients are asked for, which are those of the messages that return them."""

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all row numbers."""
        returns = (self.results, *self.gradients.values())
        slices = [s for some in (*self.packed.values(), *(table.slices for table in returns)) for s in some]
        tensors = [table.rows for table in returns] + [s.rows for s in slices]
        return sum(x.nbytes for x in tensors) + sum(stack.nbytes for stack in self.stacks)

    def to(self, device: torch.device) -> IndexTables:
        """The same for rows on `device`."""
        return replace(
            self,
            packed={roles: [s.to(device) for s in slices] for roles, slices in self.packed.items()},
            results=self.results.to(device),
            gradients={role: table.to(device) for role, table in self.gradients.items()},
            stacks=tuple(stack.to(device) for stack in self.stacks),
        )


@dataclass(frozen=True)
class Choice:
    """What a rank needs tables for: the `branches` of a round, and the gradients that are asked for.

    With `dropout` each problem has rows at equal steps, so that the place of each weight in the whole is known. With `by_head`
    no stack has problems of different heads, so that each has a bias of its own.
    """

    branches: tuple[int, ...]
    gradients: str = "qkv"
    dropout: bool = False
    by_head: bool = False


def index_tables(
    plan: ExchangePlan, rank: int, batch: int, device: torch.device = HOST, choice: Choice | None = None
) -> IndexTables:
    """The tables of a rank, for rows on `device`, made once and kept in the cache of patterns; by default for all branches."""
    choice = choice or Choice(tuple(range(len(plan.routes))))
    in_slots = not choice.dropout and any(isinstance(plan.exchanges[b], BlockExchange) for b in choice.branches)
    choice = replace(choice, dropout=not in_slots)  # which is all that the tables know of it
    name = ("exchange tables", plan, rank, batch, choice)
    if device.type == HOST.type:
        return core_plan.cached(name, lambda: _TableBuilder(plan, rank, batch, choice).tables())
    return core_plan.cached((*name, device), lambda: index_tables(plan, rank, batch, HOST, choice).to(device))


class _TableBuilder:
    """Makes the index tables of one rank."""

    def __init__(self, plan: ExchangePlan, rank: int, batch: int, choice: Choice) -> None:
        self.plan, self.rank, self.batch, self.choice = plan, rank, batch, choice
        self.rows = batch * len(plan.positions(rank)) * plan.heads
        self.outgoing, self.incoming = self._outgoing(), self._incoming()

    def tables(self) -> IndexTables:
        """All of them."""
        size, batch, returned = self.plan.world_size, self.batch, self.choice.gradients
        every = ("qkv", "q", "k", returned)
        self.sent = {roles: MessageLayout.of(self.outgoing, roles, size, batch) for roles in every}
        self.received = {roles: MessageLayout.of(self.incoming, roles, size, batch) for roles in every}
        packed = {role: list(self._slices(role, "qkv")) for role in "qkv"}
        packed |= {role * 2: list(self._slices(role, role)) for role in "qk"}
        results = ReturnTable.of(packed["qq"])
        gradients = {role: ReturnTable.of([*self._slices(role, returned)]) for role in returned}
        # One problem a stack where bits must be the same for every world size: a backend's may depend on what else is in a call.
        most_rows = stack_rows(self.rows) if self.plan.fuse_branches else 0
        problems, facts = list(self._problems()), (self._received_runs(), self.batch, most_rows, self.choice.by_head)
        stacks = (*stack_problems((one for one in problems if isinstance(one, SmallProblem)), *facts),)
        stacks += (*stack_slots((one for one in problems if isinstance(one, SlotProblem)), *facts),)
        return IndexTables(self.sent, self.received, packed, results, gradients, stacks, returned)

    @cached_property
    def segments(self) -> list[ShardedSegment]:
        """The segments that this rank holds rows of, and whose rows travel by all-to-all."""
        plan = self.plan
        own_segments: list[ShardedSegment] = []
        for branch in self.choice.branches:
            if not plan.fuse_branches:
                sizes = (plan.heads, plan.kv_heads, plan.is_causal)
                own_segments += local_segments(plan.forms[branch], branch, plan.cuts, self.rank, *sizes)
            if plan.routes[branch].kind != "ring":
                own_segments += [segment for segment in plan.sharded_segments[branch] if segment.holds(self.rank)]
        return own_segments

    @cached_property
    def exchanges(self) -> list[BranchExchange]:
        """Those of branches without segments, in which this rank takes part."""
        some = (self.plan.exchanges[branch] for branch in self.choice.branches)
        return [exchange for exchange in some if exchange is not None and self.rank in exchange.held]

    def _outgoing(self) -> Messages:
        """What this rank sends, itself included: queries to the rank that computes them, keys to all ranks that see them."""
        messages: Messages = defaultdict(lambda: Message([], []))
        for segment in self.segments:
            me = segment.index_of(self.rank)
            group, computing = int(segment.group_of[me]), segment.compute_ranks
            for head in range(len(segment.heads)):
                if kept := kept_rows(segment, head, me):
                    messages[segment.branch, int(computing[group, head])].queries.append(kept)
                    for other in range(group, len(computing)) if segment.is_causal else range(len(computing)):
                        messages[segment.branch, int(computing[other, head])].keys.append(kept)
        sent = {(e.number, peer): e.message(self.rank, peer) for e in self.exchanges for peer in e.peers(self.rank)}
        return {**messages, **sent}

    def _incoming(self) -> Messages:
        """What this rank receives, from itself included."""
        messages: Messages = defaultdict(lambda: Message([], []))
        for segment, group, head in self._computed_heads():
            seen = int(segment.group_bounds[segment.key_groups(group)[-1] + 1])
            for source in range(seen):
                if kept := kept_rows(segment, head, source):
                    message = messages[segment.branch, int(segment.ranks[source])]
                    message.keys.append(kept)
                    if segment.group_of[source] == group:
                        message.queries.append(kept)
        received = {(e.number, peer): e.message(peer, self.rank) for e in self.exchanges for peer in e.peers(self.rank)}
        return {**messages, **received}

    def _computed_heads(self) -> Iterator[tuple[ShardedSegment, int, int]]:
        """The heads whose queries this rank computes, by segment: `(segment, its group there, head)`."""
        for segment in self.segments:
            group = int(segment.group_of[segment.index_of(self.rank)])
            for head in np.flatnonzero(segment.compute_ranks[group] == self.rank).tolist():
                yield segment, group, head

    def _slices(self, role: str, roles: str) -> Iterator[MessageSlice]:
        for (branch, rank), message in sorted(self.outgoing.items()):
            some = message.queries if role == "q" else message.keys
            if some:
                rows = row_numbers([row_run(self.plan, self.rank, kept, role) for kept in some], self.batch)
                yield MessageSlice(branch, self.sent[roles].starts[role, branch, rank], rows)

    def _problems(self) -> Iterator[SmallProblem | SlotProblem]:
        for exchange in self.exchanges:
            yield from exchange.problems(self.rank) if self.choice.dropout else exchange.in_slots(self.rank)
        for segment, group, head in self._computed_heads():
            pattern = self.plan.segment_pattern(segment.heads[head].kv_head)
            if pattern is None:
                continue
            for other in segment.key_groups(group):
                causal = segment.is_causal and other == group
                queries, keys = group_kept_rows(segment, head, group), group_kept_rows(segment, head, other)
                if queries and keys:
                    yield SmallProblem(ProblemRows.whole(queries), ProblemRows.whole(keys), causal, pattern, other)

    def _received_runs(self) -> RunsByRole:
        """Where kept rows lie in what this rank receives, for each kind of message."""
        runs_by_role: RunsByRole = {name: {} for name in ("q", "k", "v", "qq", "kk")}
        for (branch, rank), message in self.incoming.items():
            totals = message.rows()
            for name, roles in (("q", "qkv"), ("k", "qkv"), ("v", "qkv"), ("qq", "q"), ("kk", "k")):
                role = name[0]
                at = self.received[roles].starts[role, branch, rank]
                total = totals[role != "q"]
                for kept in message.queries if role == "q" else message.keys:
                    width = kept.width if role == "q" else 1
                    runs_by_role[name][kept] = (at, width, kept.positions, width, total)
                    at += kept.positions * width
        return runs_by_role
