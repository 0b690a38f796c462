"""Index tables of one rank: which of its rows it sends to whom, and where the rows that it computes with lie in what it receives.

A message from one rank to another has, branch by branch, the rows of the queries, then of the keys, then of the values; each of
these batch by batch, run by run of `BranchExchange.message`, head by head, in sequence order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from dilkit import plan as core_plan
from dilkit.comm.passes.problem_stacks import ProblemStack, RunsByRole, stack_problems, stack_rows
from dilkit.comm.passes.row_index import HOST, own_row_numbers
from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.plan.kinds.blocks import BlockExchange
from dilkit.comm.plan.messages import Message, by_head, message_rows
from dilkit.comm.plan.segments import SegmentExchange

Slices = list[tuple[slice, Tensor]]
"""Parts of messages, and the rows that lie there: `(batch * seq * heads)` numbers of this rank."""
Returned = tuple[Tensor, Slices]
"""The rows of this rank for which something is returned, each once; and for each part of what is returned, which of them."""


@dataclass(frozen=True)
class IndexTables:
    """The index tables of one rank, batch size and device, for a round.

    `sent` and `received` are the rows of the message to or from each rank, by roles: "qkv", "q", "k", and those of `returned`.
    """

    sent: dict[str, list[int]]
    received: dict[str, list[int]]
    packed: dict[str, Slices]
    """Sent rows: "q", "k", "v" in messages "qkv", "qq" in messages of queries alone, "kk" in messages of keys alone."""
    results: Returned
    """Results that return for the queries, in messages "q", branch by branch."""
    gradients: dict[str, Returned]
    stacks: tuple[ProblemStack, ...]
    returned: str
    """The roles of which gradients are asked for, which are those of the messages that return them."""
    returned_spans: list[slice]
    """The parts of received messages "qkv" that hold these roles."""

    @cached_property
    def nbytes(self) -> int:
        returns = (self.results, *self.gradients.values())
        slices = [rows for some in (*self.packed.values(), *(slices for _, slices in returns)) for _, rows in some]
        return sum(x.nbytes for x in (*(rows for rows, _ in returns), *slices)) + sum(stack.nbytes for stack in self.stacks)


def index_tables(
    plan: ExchangePlan,
    rank: int,
    batch: int,
    device: torch.device = HOST,
    branches: tuple[int, ...] | None = None,
    gradients: str = "qkv",
    dropout: bool = False,
    apart: bool = False,
) -> IndexTables:
    """Return the tables of a rank for the `branches` of a round, by default all; they are kept in the cache of patterns.

    With `dropout` each problem has rows at equal steps, so that the place of each weight in the whole is known. With `apart` no
    stack has problems of different heads, so that each has a bias of its own.
    """
    branches = tuple(range(len(plan.routes))) if branches is None else branches
    in_slots = not dropout and any(isinstance(plan.exchanges[b], BlockExchange) for b in branches)
    facts = plan, rank, batch, device, branches, gradients, in_slots, apart
    return core_plan.cached(("exchange tables", *facts), _index_tables, *facts)


def _index_tables(
    plan: ExchangePlan,
    rank: int,
    batch: int,
    device: torch.device,
    branches: tuple[int, ...],
    gradients: str,
    in_slots: bool,
    apart: bool,
) -> IndexTables:
    exchanges = [exchange for b in branches if rank in (exchange := plan.exchanges[b]).held and plan.routes[b].kind != "ring"]
    exchanges.sort(key=lambda exchange: isinstance(exchange, SegmentExchange))  # gradients of a bias are summed up in this order
    peers = [(exchange, peer) for exchange in exchanges for peer in exchange.peers(rank)]
    outgoing = {(exchange.number, peer): exchange.message(rank, peer) for exchange, peer in peers}
    incoming = {(exchange.number, peer): exchange.message(peer, rank) for exchange, peer in peers}
    every = {"qkv", "q", "k", gradients}
    sent, sent_starts = _layouts(outgoing, every, plan.world_size, batch)
    received, received_starts = _layouts(incoming, every, plan.world_size, batch)

    def slices(role: str, roles: str) -> Slices:
        parts = []
        for (branch, peer), message in sorted(outgoing.items()):
            if some := message[role != "q"]:
                rows = own_row_numbers(plan, rank, by_head(branch, some), role, batch).to(device)
                start = sent_starts[roles][role, branch, peer]
                parts.append((slice(start, start + len(rows)), rows))
        return parts

    packed = {role: slices(role, "qkv") for role in "qkv"} | {role * 2: slices(role, role) for role in "qk"}
    # One problem a stack where bits must be the same for every world size: a backend's may depend on what else is in a call.
    most_rows = stack_rows(batch * len(plan.positions(rank)) * plan.heads) if plan.fuse_branches else 0
    problems = [one for exchange in exchanges for one in (exchange.in_slots(rank) if in_slots else exchange.problems(rank))]
    problems.sort(key=lambda problem: problem.slot > 1)
    stacks = stack_problems(problems, _received_runs(incoming, received_starts), batch, most_rows, apart)
    edges = pairwise([*received_starts["qkv"].values(), sum(received["qkv"])])
    return IndexTables(
        sent,
        received,
        packed,
        _returned(packed["qq"], device),
        {role: _returned(slices(role, gradients), device) for role in gradients},
        tuple(stack.to(device) for stack in stacks),
        gradients,
        [slice(*ends) for (role, _, _), ends in zip(received_starts["qkv"], edges, strict=True) if role in gradients],
    )


Starts = dict[tuple[str, int, int], int]
"""Places at which rows begin in all messages, by (role, branch, other rank)."""


def _layouts(
    messages: dict[tuple[int, int], Message], every: set[str], world_size: int, batch: int
) -> tuple[dict[str, list[int]], dict[str, Starts]]:
    """Return, for each choice of roles, the rows of each rank's message and where each role and branch begins in it."""
    counts, starts = {roles: [0] * world_size for roles in every}, dict[str, Starts]()
    by_rank = [
        (branch, rank, message_rows(messages[branch, rank])) for branch, rank in sorted(messages, key=lambda key: key[::-1])
    ]
    for roles in every:
        start, starts[roles] = 0, {}
        for branch, rank, (queries, keys) in by_rank:
            for role in roles:
                starts[roles][role, branch, rank] = start
                rows = batch * (queries if role == "q" else keys)
                start += rows
                counts[roles][rank] += rows
    return counts, starts


def _returned(slices: Slices, device: torch.device) -> Returned:
    every = torch.cat([torch.empty(0, dtype=torch.int64, device=device), *(rows for _, rows in slices)])
    distinct = torch.unique(every)
    return distinct, [(span, torch.searchsorted(distinct, rows)) for span, rows in slices]


def joined(tables: Sequence[Returned]) -> tuple[Tensor, list[Slices]]:
    """Return the rows of several tables, each once; and for each table its slices, with rows numbered among them."""
    if len(tables) == 1:
        return tables[0][0], [tables[0][1]]
    distinct = torch.unique(torch.cat([rows for rows, _ in tables]))
    places = [torch.searchsorted(distinct, rows) for rows, _ in tables]
    return distinct, [[(span, place[rows]) for span, rows in slices] for (_, slices), place in zip(tables, places, strict=True)]


def _received_runs(incoming: dict[tuple[int, int], Message], starts: dict[str, Starts]) -> RunsByRole:
    runs_by_role: RunsByRole = {name: {} for name in ("q", "k", "v", "qq", "kk")}
    for (branch, rank), message in incoming.items():
        totals = message_rows(message)
        for name, roles in (("q", "qkv"), ("k", "qkv"), ("v", "qkv"), ("qq", "q"), ("kk", "k")):
            role, total = name[0], totals[name[0] != "q"]
            start = starts[roles][role, branch, rank]
            for rows in by_head(branch, message[role != "q"]):
                width = rows.head.width if role == "q" else 1
                runs_by_role[name][rows] = (start, width, rows.size, width, total)
                start += rows.size * width
    return runs_by_role
