"""Other sequence-parallel schemes, on dilkit's kernels and transport: each moves whole shards, whatever the pattern keeps.

| scheme | forward sends, in shards of keys and values | backward |
|---|---|---|
| `FullRing` | p - 1: they go round | p - 1, and p times their gradients in fp32, as ring-flash-attention does |
| `AllGather` | p - 1: every rank gets all | p - 1: gradients to the ranks whose they are |
| `Ulysses` | 2 (p - 1) / p: queries, keys and values to the ranks of their heads, results back | as many: dout, gradients |

The first two compute with the shard that they have while another travels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dilkit.comm.transports.base import Pending
from dilkit.op.operators import backward_op, encode_call, forward_op
from dilkit.problem import DTYPE_BYTES
from dilkit.testing.accuracy import Results
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench.hosts.blocks import WIDE, ShardAttention
from dilkit.tools.measure.ranks_call import RanksCall


@dataclass(frozen=True)
class Peer(RanksCall):
    """A scheme, measured as a `RanksCall` is. Raises ValueError for a problem whose shards do not fit its segments."""

    @cached_property
    def shards(self) -> ShardAttention:
        """Attention to whole shards."""
        return ShardAttention(self.problem, self.comm.size, self.comm.rank)

    def once(self, inputs: Tensors) -> Results:
        """`out` of this rank's rows; where the problem asks for gradients, `dq`, `dk` and `dv` too."""
        query, key, value = (x.detach() for x in inputs.qkv)
        results = self.attend(query, key, value, inputs.dout)
        return {name: x.to(query.dtype) for name, x in zip(("out", "dq", "dk", "dv"), results, strict=False)}

    def planned_bytes(self) -> tuple[int, ...]:
        p = self.problem
        numbers = 2 * self.shards.rows * p.heads * p.head_dim
        forward, backward, wide = self.sent
        narrow = forward + backward * p.requires_grad
        sent = numbers * (narrow * DTYPE_BYTES[p.dtype] + wide * p.requires_grad * WIDE.itemsize)
        return (round(sent),) * self.comm.size

    @property
    @abstractmethod
    def sent(self) -> tuple[float, float, float]:
        """What a rank sends forward, backward, and backward in fp32: in keys and values of a shard."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, dout: Tensor) -> Sequence[Tensor]:
        """`out` and, where the problem asks for them, gradients of query, key and value."""

    def _to_next(self, rows: Tensor, step: str) -> Pending:
        """Begin to send `rows` to the next rank, and to receive as many from the one before."""
        size, rank, (sends, receives) = self.comm.size, self.comm.rank, ([0] * self.comm.size, [0] * self.comm.size)
        flat = rows.view(2 * self.shards.rows, -1)
        sends[(rank + 1) % size] = receives[(rank - 1) % size] = len(flat)
        return self.comm.exchange(flat, sends, receives, step)

    def _to_others(self, rows: Tensor, step: str) -> Pending:
        """Begin to send a part of `rows` to each other rank, in their order, and to receive as much from each."""
        counts = [0 if other == self.comm.rank else 2 * self.shards.rows for other in range(self.comm.size)]
        return self.comm.exchange(rows.view(sum(counts), -1), counts, counts, step)

    @property
    def _others(self) -> list[int]:
        return [other for other in range(self.comm.size) if other != self.comm.rank]


@dataclass(frozen=True)
class FullRing(Peer):
    """All keys and values go round; backward they go round once more, and their gradients with them, a step behind."""

    @property
    def sent(self) -> tuple[float, float, float]:
        return self.comm.size - 1, self.comm.size - 1, self.comm.size

    def attend(self, query: Tensor, key: Tensor, value: Tensor, dout: Tensor) -> Sequence[Tensor]:
        block = torch.cat((key, value))
        under_way = self._to_next(block, "keys and values")
        out, lse = self.shards.own(query, key, value)
        for hop in range(1, self.comm.size):
            block = under_way.wait().view(block.shape)
            if hop + 1 < self.comm.size:
                under_way = self._to_next(block, "keys and values")
            self.shards.add(out, lse, query, block, (self.comm.rank - hop) % self.comm.size)
        out = out.to(query.dtype)
        return (out, *self._gradients(dout, query, key, value, out, lse)) if self.problem.requires_grad else (out,)

    def _gradients(self, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> Sequence[Tensor]:
        block = torch.cat((key, value))
        under_way = self._to_next(block, "keys and values")
        dquery, *of_own = self.shards.own_gradients(dout, query, key, value, out, lse)
        behind = self._to_next(torch.cat(of_own), "gradients of keys and values")
        for hop in range(1, self.comm.size):
            block = under_way.wait().view(block.shape)
            if hop + 1 < self.comm.size:
                under_way = self._to_next(block, "keys and values")
            other = (self.comm.rank - hop) % self.comm.size
            found = self.shards.add_gradients(dquery, dout, query, block, out, lse, other)
            found += behind.wait().view(found.shape)
            behind = self._to_next(found, "gradients of keys and values")
        return dquery, *behind.wait().view(block.shape).chunk(2)


@dataclass(frozen=True)
class AllGather(Peer):
    """Every rank gets all keys and values, and returns their gradients to the ranks whose they are."""

    @property
    def sent(self) -> tuple[float, float, float]:
        return self.comm.size - 1, self.comm.size - 1, 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, dout: Tensor) -> Sequence[Tensor]:
        own = torch.cat((key, value))
        under_way = self._to_others(own.repeat(self.comm.size - 1, 1, 1, 1), "keys and values")
        out, lse = self.shards.own(query, key, value)
        blocks = under_way.wait().view(-1, *own.shape)
        for other, block in zip(self._others, blocks, strict=True):
            self.shards.add(out, lse, query, block, other)
        out = out.to(query.dtype)
        if not self.problem.requires_grad:
            return (out,)
        of_queries, of_blocks = torch.zeros_like(query, dtype=WIDE), torch.empty_like(blocks)
        for other, block, found in zip(self._others, blocks, of_blocks, strict=True):
            found.copy_(self.shards.add_gradients(of_queries, dout, query, block, out, lse, other))
        under_way = self._to_others(of_blocks, "gradients of keys and values")
        dquery, *of_own = self.shards.own_gradients(dout, query, key, value, out, lse)
        dkey, dvalue = torch.cat(of_own).add_(under_way.wait().view(blocks.shape).to(WIDE).sum(0)).chunk(2)
        return out, dquery + of_queries, dkey, dvalue


@dataclass(frozen=True)
class Ulysses(Peer):
    """The ranks divide the heads: each computes its own of the whole sequence."""

    @property
    def sent(self) -> tuple[float, float, float]:
        share = 2 * (self.comm.size - 1) / self.comm.size
        return share, share, 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, dout: Tensor) -> Sequence[Tensor]:
        p, first = self.problem, self.comm.rank * self.problem.heads // self.comm.size
        pattern = p.pattern.with_branches(*p.pattern.branches, head_shard=(first, p.heads))
        call = encode_call(pattern, False, p.requires_grad, "")
        of_heads = self._to_heads(query, key, value)
        out, lse = forward_op(*of_heads, None, p.scale, call)
        (of_rows,) = self._to_rows(out)
        if not p.requires_grad:
            return (of_rows,)
        (dout,) = self._to_heads(dout)
        return of_rows, *self._to_rows(*backward_op(dout, *of_heads, out, lse, None, p.scale, call)[:3])

    def _to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """From all heads of this rank's rows to this rank's heads of all rows."""
        rows, size, d = self.shards.rows, self.comm.size, self.problem.head_dim
        parts = torch.stack(tensors).view(len(tensors), rows, size, -1, d).permute(2, 0, 1, 3, 4)
        got = self._exchanged(parts, "rows of heads").permute(1, 0, 2, 3, 4)
        return [*got.reshape(len(tensors), 1, rows * size, -1, d).contiguous()]

    def _to_rows(self, *tensors: Tensor) -> list[Tensor]:
        """Back again."""
        rows, size, d = self.shards.rows, self.comm.size, self.problem.head_dim
        parts = torch.stack(tensors).view(len(tensors), size, rows, -1, d).transpose(0, 1)
        got = self._exchanged(parts, "rows back").permute(1, 2, 0, 3, 4)
        return [*got.reshape(len(tensors), 1, rows, -1, d)]

    def _exchanged(self, parts: Tensor, step: str) -> Tensor:
        """Part t of `parts` goes to rank t."""
        flat = parts.reshape(-1, parts.shape[-2] * parts.shape[-1]).contiguous()
        counts = [len(flat) // self.comm.size] * self.comm.size
        return self.comm.exchange(flat, counts, counts, step).wait().view(parts.shape)


PEERS: dict[str, type[Peer]] = {"full ring": FullRing, "all-gather": AllGather, "ulysses": Ulysses}
"""By name."""
