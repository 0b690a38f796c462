"""The ring schedule of a branch: keys and values go round the ranks of a segment, hop by hop, and never lie together.

At hop s the member i of a segment computes with block `i - s`, while block `i - s - 1` is on its way from member `i - 1` and
block `i - s` to member `i + 1`. Without causality blocks go around to all; with it, a block goes on to the members after its own
only. Gradients of a block go home in one hop. What is sent and what is received lies in buffers of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dilkit.comm.passes.calls import Call, SmallProblem, call_rows, make_calls
from dilkit.comm.passes.compute import Kernel, Rows
from dilkit.comm.passes.partial import Partial
from dilkit.comm.passes.parts import Part, Run, expand, part_key, part_of, row_run
from dilkit.comm.passes.rows import as_bytes, from_bytes, take
from dilkit.comm.passes.tables import HOST
from dilkit.comm.plan.exchange_plan import ExchangePlan
from dilkit.comm.plan.spread import Spread
from dilkit.comm.transports.base import Comm, Pending

Block = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class Circle:
    """One segment of a ring, seen from one of its members."""

    plan: ExchangePlan
    spread: Spread
    member: int
    batch: int
    device: torch.device = HOST

    @property
    def size(self) -> int:
        return len(self.spread.ranks)

    @property
    def rank(self) -> int:
        return self.neighbour(0)

    def neighbour(self, distance: int) -> int:
        """The rank of the member `distance` after this one."""
        return int(self.spread.ranks[(self.member + distance) % self.size])

    def reaches(self, distance: int) -> bool:
        """Whether this member has to do with the one `distance` after it (before it, if negative) at hop `abs(distance)`."""
        if self.spread.is_causal:
            return 0 <= self.member + distance < self.size
        return abs(distance) < self.size

    def passes_on(self, hop: int) -> bool:
        """Whether the next member has a use for the block that this one computes with at a hop."""
        return self.reaches(1) if self.spread.is_causal else hop + 1 < self.size

    def parts(self, distance: int) -> list[Part]:
        """What the member `distance` after this one holds, head by head."""
        member = (self.member + distance) % self.size
        found = (part_of(self.spread, head, member) for head in range(len(self.spread.heads)))
        return [part for part in found if part]

    def keys(self, distance: int) -> int:
        """Rows of keys that the member `distance` after this one holds."""
        return self.batch * sum(part.count for part in self.parts(distance))

    def own_rows(self, role: str) -> Tensor:
        """The rows of queries ("q") or keys ("k") that this member holds, as `(batch * seq * heads)` numbers."""
        return expand([row_run(self.plan, self.rank, part, role) for part in self.parts(0)], self.batch).to(self.device)

    def calls(self, hop: int) -> Iterator[Call]:
        """What is computed at a hop: own queries with the keys of the member `hop` before."""
        queries, keys = self.parts(0), {part.head: part for part in self.parts(-hop)}
        causal = self.spread.is_causal and hop == 0
        problems = [SmallProblem([part], [keys[part.head]], causal) for part in queries if part.head in keys]
        by_query = _starts(queries, True)
        by_key = _starts(keys.values(), False)
        starts = {"q": by_query, "qq": by_query, "k": by_key, "v": by_key, "kk": by_key}
        rows = self.batch * len(self.plan.positions(self.rank)) * self.plan.heads
        return (call.to(self.device) for call in make_calls(problems, starts, self.batch, call_rows(rows)))


def circles(plan: ExchangePlan, branch: int, rank: int, batch: int, device: torch.device = HOST) -> list[Circle]:
    """The segments of a ring branch that a rank is a member of, for rows on `device`."""
    return [
        Circle(plan, spread, rank - int(spread.ranks[0]), batch, device)
        for spread in plan.spreads[branch]
        if spread.ranks[0] <= rank <= spread.ranks[-1]
    ]


class Round:
    """Keys and values going round the circles of a branch: iterating gives for each hop the block that each circle is at.

    A block is `(keys, values, flags)`, `(n, head_dim)` twice and `(n,)` or None; None where a circle has come to its end. The
    next blocks are under way while those of a hop are being computed with.
    """

    def __init__(self, comm: Comm, circles: list[Circle], hops: int, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
        self.comm, self.circles, self.hops = comm, circles, hops
        self.kinds = [(key.shape[-1], key.dtype)] * 2 + [(1, torch.bool)] * (mask is not None)
        columns = [key, value]
        if mask is not None:
            columns.append(mask[:, :, None, None].expand(*key.shape[:3], 1).contiguous())
        self.own = [as_bytes(*(take(x, circle.own_rows("k")) for x in columns)) for circle in circles]
        self.like = key.new_empty(0, sum(width * dtype.itemsize for width, dtype in self.kinds), dtype=torch.uint8)

    def __iter__(self) -> Iterator[tuple[int, list[Block | None]]]:
        held: list[Tensor | None] = list(self.own)
        for hop in range(self.hops):
            coming = self._pass_on(hop, held) if hop + 1 < self.hops else None
            yield hop, [None if rows is None else self._block(rows) for rows in held]
            if coming is not None:
                arrived = iter(coming.wait())
                held = [next(arrived) if circle.reaches(-hop - 1) else None for circle in self.circles]

    def _block(self, rows: Tensor) -> Block:
        key, value, *flags = from_bytes(rows, *self.kinds)
        return key, value, flags[0].view(-1) if flags else None

    def _pass_on(self, hop: int, held: list[Tensor | None]) -> Parts:
        sends = [
            (circle.neighbour(1), rows)
            for circle, rows in zip(self.circles, held, strict=True)
            if rows is not None and circle.passes_on(hop)
        ]
        wants = [(c.neighbour(-1), c.keys(-hop - 1)) for c in self.circles if c.reaches(-hop - 1)]
        return Parts.exchange(self.comm, sends, wants, self.like, f"keys and values, hop {hop + 1} of {self.hops - 1}")


@dataclass
class Parts:
    """Tables of rows under way, several perhaps from one rank; `wait()` gives them in the order in which they were asked for."""

    pending: Pending
    order: list[int]
    counts: list[int]

    @classmethod
    def exchange(
        cls, comm: Comm, sends: list[tuple[int, Tensor]], wants: list[tuple[int, int]], like: Tensor, step: str
    ) -> Parts:
        """Send `(rank, rows)` and receive `(rank, number of rows)`; `like` has the width and the dtype of all."""
        send_counts, recv_counts = [0] * comm.size, [0] * comm.size
        for rank, rows in sends:
            send_counts[rank] += len(rows)
        for rank, count in wants:
            recv_counts[rank] += count
        together = torch.cat([like, *(rows for _, rows in sorted(sends, key=lambda send: send[0]))])
        order = sorted(range(len(wants)), key=lambda i: wants[i][0])
        return cls(comm.exchange(together, send_counts, recv_counts, step), order, [wants[i][1] for i in order])

    def wait(self) -> list[Tensor]:
        """The tables."""
        found = dict(zip(self.order, self.pending.wait().split(self.counts), strict=True))
        return [found[i] for i in range(len(found))]


def ring_forward(
    kernel: Kernel, comm: Comm, plan: ExchangePlan, branch: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> list[tuple[Tensor, Partial]]:
    """What this rank's queries see through a branch: `(rows, results)` for each of its segments."""
    members = circles(plan, branch, comm.rank, len(query), query.device)
    rows = [circle.own_rows("q") for circle in members]
    queries = [take(query, own) for own in rows]
    found = [Partial.empty(len(own), query.shape[-1], query) for own in rows]
    for hop, blocks in Round(comm, members, _hops(plan, branch), key, value, mask):
        for circle, own, result, block in zip(members, queries, found, blocks, strict=True):
            for call in circle.calls(hop) if block else ():
                kernel.join(result, call, Rows(own, *block))
    return list(zip(rows, found, strict=True))


@dataclass
class RingGradients:
    """Gradients of one segment: rows of queries and of keys by number, and theirs, in fp32 (fp64 for fp64)."""

    queries: Tensor
    dquery: Tensor
    keys: Tensor
    dkey: Tensor
    dvalue: Tensor


def ring_backward(
    kernel: Kernel, comm: Comm, plan: ExchangePlan, branch: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    dout: Tensor, out: Tensor, lse: Tensor,
) -> list[RingGradients]:  # fmt: skip
    """Gradients through a branch; `dout` and `out` like `query`, `lse` `(batch, seq, heads)` of this rank's rows."""
    members, hops = circles(plan, branch, comm.rank, len(query), query.device), _hops(plan, branch)
    backward = _Backward(kernel, comm, members, query, key, dout, out, lse)
    for hop, blocks in Round(comm, members, hops, key, value, mask):
        backward.hop(hop, blocks)
    backward.receive()
    return backward.found


class _Backward:
    """The backward pass of a ring under way."""

    def __init__(
        self,
        kernel: Kernel,
        comm: Comm,
        members: list[Circle],
        query: Tensor,
        key: Tensor,
        dout: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        self.kernel, self.comm, self.members = kernel, comm, members
        self.found: list[RingGradients] = []
        self.own: list[tuple[Tensor, ...]] = []
        d, self.dtype, self.coming = query.shape[-1], key.dtype, None
        self.like = key.new_empty(0, 2 * d)
        for circle in members:
            rows, keys = circle.own_rows("q"), circle.own_rows("k")
            self.own.append((take(query, rows), take(dout, rows), take(out, rows), lse.reshape(-1)[rows]))
            zeros = [lse.new_zeros(len(x), d) for x in (rows, keys, keys)]
            self.found.append(RingGradients(rows, zeros[0], keys, zeros[1], zeros[2]))

    def hop(self, hop: int, blocks: list[Block | None]) -> None:
        """Compute with these blocks, and begin to send home what they get."""
        sends, wants = [], []
        for i, (circle, block) in enumerate(zip(self.members, blocks, strict=True)):
            if block is not None:
                grads = self._compute(i, circle, hop, block)
                if hop == 0:
                    self._land(i, grads)
                else:
                    sends.append((circle.neighbour(-hop), grads.to(self.dtype)))
        self.receive()
        if hop:
            self.expected = [i for i, circle in enumerate(self.members) if circle.reaches(hop)]
            wants = [(self.members[i].neighbour(hop), len(self.found[i].keys)) for i in self.expected]
            self.coming = Parts.exchange(self.comm, sends, wants, self.like, f"gradients of keys and values, hop {hop}")

    def receive(self) -> None:
        """Take in what others computed for the blocks of this rank."""
        if self.coming is not None:
            for i, grads in zip(self.expected, self.coming.wait(), strict=True):
                self._land(i, grads)
        self.coming = None

    def _land(self, i: int, grads: Tensor) -> None:
        dkey, dvalue = grads.to(self.found[i].dkey.dtype).chunk(2, dim=1)
        self.found[i].dkey += dkey
        self.found[i].dvalue += dvalue

    def _compute(self, i: int, circle: Circle, hop: int, block: Block) -> Tensor:
        """The gradients of a block, `(n, 2 * head_dim)`; those of the queries are added up here."""
        query, dout, out, lse = self.own[i]
        grads = lse.new_zeros(len(block[0]), self.like.shape[1])
        for call in circle.calls(hop):
            (rows, dquery), (keys, dkey, dvalue) = self.kernel.backward(call, Rows(query, *block), dout, out, lse)
            self.found[i].dquery[rows] += dquery
            grads[call.keys[keys]] += torch.cat((dkey, dvalue), dim=1)
        return grads


def _hops(plan: ExchangePlan, branch: int) -> int:
    """Hops of the widest segment: all ranks take part in as many exchanges."""
    return max(len(spread.ranks) for spread in plan.spreads[branch])


def _starts(parts: Iterable[Part], queries: bool) -> dict[tuple[int, int, int], Run]:
    """Where parts lie in a table that has them one after the other, batch by batch."""
    parts = list(parts)
    sizes = [part.count * (part.width if queries else 1) for part in parts]
    firsts = accumulate(sizes, initial=0)
    return {part_key(part): (at, 1, 1, size, sum(sizes)) for part, size, at in zip(parts, sizes, firsts, strict=False)}
