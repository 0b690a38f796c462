"""The passes of a ring schedule: key/value blocks go from rank to rank, hop by hop, and never lie together.

hop        0       1       2          member i computes with block i - hop, while block i - hop - 1 comes from
member 0   B0      B2      B1         member i - 1 and block i - hop goes to member i + 1.
member 1   B1 <-   B0 <-   B2
member 2   B2 <-   B1 <-   B0         With causality a block goes only to the members after its own.

In a backward pass blocks rotate as in the forward pass, and their gradients return in one hop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from dilkit import plan as core_plan
from dilkit.comm.passes.attention_op import AttentionOp, PartialResults, QKVRows, no_results
from dilkit.comm.passes.problem_stacks import ProblemStack, RunsByRows, stack_problems, stack_rows
from dilkit.comm.passes.rank_bias import RankBias
from dilkit.comm.passes.row_index import HOST, collect_rows, own_row_numbers, pack_columns, unpack_columns
from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.plan.messages import HeadRows, SmallProblem, whole
from dilkit.comm.plan.segments import SegmentExchange
from dilkit.comm.transports.base import Comm
from dilkit.environment import cache_bytes
from dilkit.inputs import Inputs
from dilkit.pattern import Pattern

SHARE = 0.25
"""Part of the pattern cache that the stacks of all ring branches of a plan may take; larger ones are made hop by hop."""
NUMBER_BYTES = 8


def ring_forward(
    op: AttentionOp, comm: Comm, plan: ExchangePlan, ring: SegmentExchange, inputs: Inputs, bias: RankBias | None
) -> list[tuple[Tensor, PartialResults]]:
    """Return what this rank's queries see through a branch: `(rows, results)` for each of its segments."""
    query = inputs.query
    segments = ring_segments(plan, ring, comm.rank, len(query), query.device, bias is not None)
    partials = [no_results(len(one.queries), query.shape[-1], query) for one in segments]
    for hop, blocks in _rotate(comm, segments, ring.hops + 1, inputs, bias):
        for segment, results, rows in zip(segments, partials, blocks, strict=True):
            if rows is not None:
                for stack in segment.stacks_at(hop):
                    op.forward(results, stack, rows, bias)
    return [(one.queries, results) for one, results in zip(segments, partials, strict=True)]


def ring_backward(
    op: AttentionOp, comm: Comm, plan: ExchangePlan, ring: SegmentExchange, inputs: Inputs, bias: RankBias | None,
    dout: Tensor, out: Tensor, lse: Tensor, gradients: str,
) -> list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]]:  # fmt: skip
    """Return gradients through a branch; `dout` and `out` like `query`, `lse` `(batch, seq, heads)` of this rank's rows.

    For each segment these are `(queries, dquery), (keys, dkey, dvalue)`: row numbers and, in fp32 (fp64 for fp64), gradients,
    whole where they are among `gradients`.
    """
    query, d = inputs.query, inputs.query.shape[-1]
    segments = ring_segments(plan, ring, comm.rank, len(query), query.device, bias is not None)
    roles = gradients.replace("q", "")
    like = inputs.key.new_empty(0, len(roles) * d)
    results = [
        (collect_rows(dout, one.queries), collect_rows(out, one.queries), lse.reshape(-1)[one.queries]) for one in segments
    ]
    dqueries = [lse.new_zeros(len(one.queries), d) for one in segments]
    own_blocks = [{role: lse.new_zeros(len(one.keys), d) for role in "kv"} for one in segments]

    def add_block(number: int, grads: Tensor) -> None:
        for role, more in zip(roles, grads.chunk(len(roles) or 1, dim=1), strict=False):
            own_blocks[number][role] += more.to(lse.dtype)

    def compute(number: int, hop: int, rows: QKVRows) -> Tensor:
        """Return the gradients of a block that are asked for, `(n, width)`; add those of the queries."""
        grads = lse.new_zeros(len(rows.keys), len(roles) * d)
        for stack in segments[number].stacks_at(hop):
            (places, dquery), (keys, dkey, dvalue) = op.backward(stack, rows, bias, *results[number])
            dqueries[number][places] += dquery
            grads[stack.keys[keys]] += torch.cat([dkey[:, :0], *(dict(k=dkey, v=dvalue)[role] for role in roles)], dim=1)
        return grads

    returning: list[tuple[list[int], Callable[[], list[Tensor]]]] = []

    def add_returned() -> None:
        """Wait for what other ranks computed for the blocks of this rank, and add it."""
        for expected, receive in returning:
            for number, grads in zip(expected, receive(), strict=True):
                add_block(number, grads)
        returning.clear()

    for hop, blocks in _rotate(comm, segments, ring.hops + 1, inputs, bias):
        sends = []
        for number, (segment, rows) in enumerate(zip(segments, blocks, strict=True)):
            if rows is not None:
                grads = compute(number, hop, rows)
                if hop == 0:
                    add_block(number, grads)
                else:
                    sends.append((segment.neighbour(-hop), grads.to(like.dtype)))
        add_returned()
        if hop:
            expected = [number for number, one in enumerate(segments) if one.reaches(hop)]
            receives = [(segments[number].neighbour(hop), len(segments[number].keys)) for number in expected]
            transfer = _transfer(comm, sends, receives, like, f"gradients of keys and values, hop {hop}")
            returning.append((expected, transfer))
    add_returned()
    return [
        ((one.queries, dquery), (one.keys, own["k"], own["v"]))
        for one, dquery, own in zip(segments, dqueries, own_blocks, strict=True)
    ]


def _rotate(
    comm: Comm, segments: list[RingSegment], hops: int, inputs: Inputs, bias: RankBias | None
) -> Iterator[tuple[int, list[QKVRows | None]]]:
    """Yield for each hop the queries of each segment with the block that it is at; None where a segment has no further hop."""
    query, key, value, mask, *_ = inputs
    tensors: list[Tensor] = [key, value]
    positions: list[Tensor | None] = [None] * len(segments)
    if bias is not None:
        tensors.append(bias.by_head(len(key), key.shape[2]))
        by_query = bias.by_head(len(query), query.shape[2])
        positions = [collect_rows(by_query, one.queries) for one in segments]
    if mask is not None:
        tensors.append(mask[:, :, None, None].expand(*key.shape[:3], 1).contiguous())
    queries = [collect_rows(query, one.queries) for one in segments]
    columns = [(x.shape[-1], x.dtype) for x in tensors]
    like = key.new_empty(0, sum(width * dtype.itemsize for width, dtype in columns), dtype=torch.uint8)
    held: list[Tensor | None] = [pack_columns(*(collect_rows(x, one.keys) for x in tensors)) for one in segments]

    def block(number: int, rows: Tensor) -> QKVRows:
        keys, values, *others = unpack_columns(rows, *columns)
        flags = None if mask is None else others.pop().view(-1)
        return QKVRows(queries[number], keys, values, flags, positions[number], others.pop() if others else None)

    for hop in range(hops):
        receive = None
        if hop + 1 < hops:
            both = [*zip(segments, held, strict=True)]
            sends = [(one.neighbour(1), rows) for one, rows in both if rows is not None and one.sends[hop]]
            receives = [(one.neighbour(-1), rows) for one in segments if (rows := one.receives[hop]) is not None]
            receive = _transfer(comm, sends, receives, like, f"keys and values, hop {hop + 1} of {hops - 1}")
        yield hop, [None if rows is None else block(number, rows) for number, rows in enumerate(held)]
        if receive is not None:
            arrived = iter(receive())
            held = [None if one.receives[hop] is None else next(arrived) for one in segments]


def _transfer(
    comm: Comm, sends: list[tuple[int, Tensor]], receives: list[tuple[int, int]], like: Tensor, step: str
) -> Callable[[], list[Tensor]]:
    """Send `(rank, rows)`, receive `(rank, number of rows)`; return a function that waits, in the order of `receives`."""
    send_counts, recv_counts = [0] * comm.size, [0] * comm.size
    for rank, rows in sends:
        send_counts[rank] += len(rows)
    for rank, count in receives:
        recv_counts[rank] += count
    message = torch.cat([like, *(rows for _, rows in sorted(sends, key=lambda send: send[0]))])
    pending = comm.exchange(message, send_counts, recv_counts, step)

    def receive() -> list[Tensor]:
        order = sorted(range(len(receives)), key=lambda i: receives[i][0])
        tables = dict(zip(order, torch.split(pending.wait(), [receives[i][1] for i in order]), strict=True))
        return [tables[i] for i in range(len(tables))]

    return receive


@dataclass(eq=False)
class RingSegment:
    """One segment of a ring branch, seen from the rank that holds the shard `line`.

    All that the rank computes with is made once: it depends on plan, rank, batch and device alone. `by_head`: no stack has
    problems of different heads.
    """

    plan: ExchangePlan
    exchange: SegmentExchange
    line: int
    batch: int
    device: torch.device = HOST
    by_head: bool = False

    @cached_property
    def lines(self) -> range:
        return self.exchange.shards.lines_around(self.line)

    def neighbour_line(self, distance: int) -> int:
        """Return the line `distance` after this one, round the segment."""
        return self.lines[(self.line - self.lines.start + distance) % len(self.lines)]

    def neighbour(self, distance: int) -> int:
        return int(self.exchange.shards.ranks[self.neighbour_line(distance)])

    def reaches(self, distance: int) -> bool:
        """True if blocks go between this rank and the one `distance` after it (before it, if negative)."""
        if self.exchange.is_causal:
            return self.line + distance in self.lines
        return abs(distance) < len(self.lines)

    def rows_of(self, distance: int) -> list[HeadRows]:
        """Return the rows that the rank `distance` after this one holds, head by head."""
        shards, line = self.exchange.shards, self.neighbour_line(distance)
        return [rows for head in range(len(shards.heads)) if (rows := shards.rows_of(self.exchange.number, line, head))]

    @cached_property
    def queries(self) -> Tensor:
        """The rows of queries that this rank holds, as `(batch * seq * heads)` numbers."""
        return own_row_numbers(self.plan, self.neighbour(0), self.rows_of(0), "q", self.batch).to(self.device)

    @cached_property
    def keys(self) -> Tensor:
        return own_row_numbers(self.plan, self.neighbour(0), self.rows_of(0), "k", self.batch).to(self.device)

    @cached_property
    def sends(self) -> tuple[bool, ...]:
        """For each hop, True if the next rank needs the block that this one computes with."""
        causal, ranks = self.exchange.is_causal, len(self.lines)
        return tuple(self.reaches(1) if causal else hop + 1 < ranks for hop in range(self.exchange.hops + 1))

    @cached_property
    def receives(self) -> tuple[int | None, ...]:
        """For each hop, the rows of keys in the block that arrives after it; None where none arrives."""
        shards, hops = self.exchange.shards, range(1, self.exchange.hops + 2)
        return tuple(self.batch * int(shards.key_rows[self.neighbour_line(-hop)]) if self.reaches(-hop) else None for hop in hops)

    def stacks_at(self, hop: int) -> Iterable[ProblemStack]:
        return self.stacks[hop] if self.keeps_stacks else self.make_stacks(hop)

    @cached_property
    def stacks(self) -> tuple[tuple[ProblemStack, ...], ...]:
        return tuple(tuple(self.make_stacks(hop)) if self.reaches(-hop) else () for hop in range(self.exchange.hops + 1))

    def make_stacks(self, hop: int) -> Iterator[ProblemStack]:
        """Yield the problems of a hop: own queries with the keys of the rank `hop` before."""
        queries, keys = self.rows_of(0), {rows.head: rows for rows in self.rows_of(-hop)}
        causal, dense = self.exchange.is_causal and hop == 0, Pattern.dense()
        pairs = [(rows, keys[rows.head]) for rows in queries if rows.head in keys]
        problems = [SmallProblem(whole([rows]), whole([seen]), causal, dense) for rows, seen in pairs]
        query_runs = _runs((rows, rows.head.width) for rows in queries)
        key_runs = _runs((rows, 1) for rows in keys.values())
        runs = {"q": query_runs, "qq": query_runs, "k": key_runs, "v": key_runs, "kk": key_runs}
        most_rows = stack_rows(self.batch * len(self.plan.positions(self.neighbour(0))) * self.plan.heads)
        return (stack.to(self.device) for stack in stack_problems(problems, runs, self.batch, most_rows, self.by_head))

    @cached_property
    def keeps_stacks(self) -> bool:
        """True if the stacks of all hops are kept; else they are made hop by hop."""
        segments = len(self.exchange.shards.lines_of[self.neighbour(0)])
        return len(self.plan.rings) * segments * self.stack_bytes <= SHARE * cache_bytes()

    @property
    def stack_bytes(self) -> int:
        """About the bytes that the stacks of all hops take."""
        keys = [len(self.keys), *(rows for rows in self.receives if rows is not None)]
        return NUMBER_BYTES * (len(keys) * len(self.queries) + sum(keys))

    @property
    def nbytes(self) -> int:
        """Bytes of all row numbers, and of the plan, which lives as long as they do."""
        stacks = sum(stack.nbytes for of_hop in self.stacks for stack in of_hop) if self.keeps_stacks else 0
        return self.plan.nbytes + self.queries.nbytes + self.keys.nbytes + stacks


def _runs(widths: Iterable[tuple[HeadRows, int]]) -> RunsByRows:
    """Return the places of rows, `width` a position, in a table that has them one after the other, batch by batch."""
    some = list(widths)
    *starts, total = accumulate((rows.size * width for rows, width in some), initial=0)
    return {rows: (start, width, rows.size, width, total) for (rows, width), start in zip(some, starts, strict=True)}


def ring_segments(
    plan: ExchangePlan, ring: SegmentExchange, rank: int, batch: int, device: torch.device = HOST, by_head: bool = False
) -> list[RingSegment]:
    """Return the segments of a ring branch that a rank holds rows of. They are kept in the cache of patterns."""
    facts, options = (plan, ring.number, batch, device, by_head), (batch, device, by_head)
    return [
        core_plan.cached(("ring segment", *facts, line), RingSegment, plan, ring, line, *options)
        for line in ring.shards.lines_of.get(rank, ())
    ]
