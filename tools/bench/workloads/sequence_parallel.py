"""Other sequence-parallel schemes, on dilkit's kernels and transport: each moves whole shards, whatever the pattern keeps."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilkit.comm.passes.attention_op import merge_rows
from dilkit.comm.passes.row_index import add_rows, collect_rows
from dilkit.comm.transports.base import Pending
from dilkit.inputs import Inputs
from dilkit.op.call_options import CallOptions
from dilkit.op.operators import attend, differentiate
from dilkit.pattern import Pattern
from dilkit.problem import DTYPE_BYTES
from dilkit.testing.accuracy import Results
from dilkit.testing.tensors import Tensors
from dilkit.tools.measure.ranks_call import RanksCall

WIDE = torch.float32
"""The dtype in which results and gradients are added up."""


@dataclass(frozen=True)
class PeerScheme(RanksCall):
    """A scheme, measured as a `RanksCall` is: of one sequence, not causal, without a mask; shards must fit the segments.

    Tensors are `(1, rows, heads, head_dim)`, `lse` `(1, rows, heads)`.
    """

    @property
    def rows(self) -> int:
        return self.problem.seq // self.comm.size

    def once(self, inputs: Tensors) -> Results:
        query, key, value = (x.detach() for x in inputs.qkv)
        results = self.attend(query, key, value, inputs.dout)
        return {name: x.to(query.dtype) for name, x in zip(("out", "dq", "dk", "dv"), results, strict=True)}

    def planned_bytes(self) -> tuple[int, ...]:
        p, (narrow, wide) = self.problem, self.sent
        numbers = 2 * self.rows * p.heads * p.head_dim
        return (round(numbers * (narrow * DTYPE_BYTES[p.dtype] + wide * WIDE.itemsize)),) * self.comm.size

    @property
    @abstractmethod
    def sent(self) -> tuple[float, float]:
        """Shards of keys and values that a rank sends, forward and backward: in the dtype of the rows, and in fp32."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, dout: Tensor) -> Sequence[Tensor]:
        """Return `out` and the gradients of query, key and value."""

    def _options(self, pattern: Pattern) -> CallOptions:
        return CallOptions(pattern, requires_grad=True, scale=self.problem.scale)


@dataclass(frozen=True)
class FullRing(PeerScheme):
    """A ring: all keys and values go round; backward they go round once more, and their gradients with them, a step behind."""

    @property
    def sent(self) -> tuple[float, float]:
        return 2 * (self.comm.size - 1), self.comm.size

    def attend(self, query: Tensor, key: Tensor, value: Tensor, dout: Tensor) -> Sequence[Tensor]:
        size, rank = self.comm.size, self.comm.rank
        lengths, rates = self.problem.pattern.segment_lengths, self.problem.pattern.dilation_rates
        of_block = self._options(Pattern([min(length, self.rows) for length in lengths], rates))
        block = torch.cat((key, value))
        under_way = self._to_next(block)
        rounded, lse = attend(Inputs(query, key, value), of_block)
        out, lse = rounded.to(WIDE), lse.transpose(1, 2).contiguous()
        for hop in range(1, size):
            block = under_way.wait().view(block.shape)
            if hop + 1 < size:
                under_way = self._to_next(block)
            self._add(out, lse, query, block, (rank - hop) % size)
        out = out.to(query.dtype)
        block = torch.cat((key, value))
        under_way = self._to_next(block)
        gradients = differentiate(dout, Inputs(query, key, value), out, lse.transpose(1, 2).contiguous(), of_block)
        dquery, dkey, dvalue = (x.to(WIDE) for x in gradients)
        behind = self._to_next(torch.cat((dkey, dvalue)))
        for hop in range(1, size):
            block = under_way.wait().view(block.shape)
            if hop + 1 < size:
                under_way = self._to_next(block)
            added = self._add_gradients(dquery, dout, query, block, out, lse, (rank - hop) % size)
            added += behind.wait().view(added.shape)
            behind = self._to_next(added)
        return out, dquery, *behind.wait().view(block.shape).chunk(2)

    def _to_next(self, rows: Tensor) -> Pending:
        size, sends, receives = self.comm.size, [0] * self.comm.size, [0] * self.comm.size
        sends[(self.comm.rank + 1) % size] = receives[(self.comm.rank - 1) % size] = 2 * self.rows
        return self.comm.exchange(rows.view(2 * self.rows, -1), sends, receives, "keys and values, or gradients")

    def _add(self, out: Tensor, lse: Tensor, query: Tensor, keys_values: Tensor, other: int) -> None:
        """Merge attention to the keys and values `(2, rows, heads, head_dim)` of rank `other`."""
        for rate in self._shared_rates(other):
            rows, (q, k, v) = self._kept(rate, query, *keys_values)
            part, part_lse = attend(Inputs(q, k, v), self._options(Pattern.dense()))
            part_lse = part_lse.transpose(1, 2).reshape(-1)
            everywhere = torch.arange(len(rows), device=rows.device)
            merge_rows(out, lse, rows, [(everywhere, part.reshape(len(rows), -1), part_lse)])

    def _add_gradients(
        self, dquery: Tensor, dout: Tensor, query: Tensor, keys_values: Tensor, out: Tensor, lse: Tensor, other: int
    ) -> Tensor:
        """Return in fp32 the gradients of rank `other`'s keys and values; add those of the queries to `dquery`."""
        gradients = torch.zeros_like(keys_values, dtype=WIDE)
        for rate in self._shared_rates(other):
            rows, (part_dout, q, k, v, part_out) = self._kept(rate, dout, query, *keys_values, out)
            lse_rows = lse.reshape(-1)[rows].view(1, -1, self.problem.heads).transpose(1, 2).contiguous()
            parts = differentiate(part_dout, Inputs(q, k, v), part_out, lse_rows, self._options(Pattern.dense()))
            for whole, part in zip((dquery, gradients[0][None], gradients[1][None]), parts, strict=True):
                add_rows(whole, rows, part.reshape(len(rows), -1))
        return gradients

    def _shared_rates(self, other: int) -> list[int]:
        first, last = sorted((self.comm.rank * self.rows, other * self.rows))
        segments = ((one.segment_length, one.dilation_rate) for one in self.problem.pattern.segments)
        return [rate for length, rate in segments if length > self.rows and first // length == last // length]

    def _kept(self, rate: int, *tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the numbers of a shard's kept rows, and these rows of each tensor: `(1, rows / rate, heads, head_dim)`."""
        heads = torch.arange(self.problem.heads)
        rows = (torch.arange(0, self.rows, rate)[:, None] + heads % rate) * self.problem.heads + heads
        numbers, shape = rows.view(-1), (1, self.rows // rate, self.problem.heads, self.problem.head_dim)
        return numbers, [collect_rows(x.view(1, *x.shape[-3:]), numbers).view(shape) for x in tensors]


@dataclass(frozen=True)
class Ulysses(PeerScheme):
    """The ranks divide the heads: each computes its own of the whole sequence."""

    @property
    def sent(self) -> tuple[float, float]:
        return 4 * (self.comm.size - 1) / self.comm.size, 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, dout: Tensor) -> Sequence[Tensor]:
        p, first = self.problem, self.comm.rank * self.problem.heads // self.comm.size
        options = self._options(p.pattern.with_branches(*p.pattern.branches, head_shard=(first, p.heads)))
        q, k, v = self._to_heads(query, key, value)
        heads = Inputs(q, k, v)
        out, lse = attend(heads, options)
        (out_rows,) = self._to_rows(out)
        (dout,) = self._to_heads(dout)
        return out_rows, *self._to_rows(*differentiate(dout, heads, out, lse, options))

    def _to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """Exchange all heads of this rank's rows for this rank's heads of all rows."""
        size, d = self.comm.size, self.problem.head_dim
        parts = torch.stack(tensors).view(len(tensors), self.rows, size, -1, d).permute(2, 0, 1, 3, 4)
        received = self._to_all(parts).permute(1, 0, 2, 3, 4)
        return [*received.reshape(len(tensors), 1, self.problem.seq, -1, d).contiguous()]

    def _to_rows(self, *tensors: Tensor) -> list[Tensor]:
        size, d = self.comm.size, self.problem.head_dim
        parts = torch.stack(tensors).view(len(tensors), size, self.rows, -1, d).transpose(0, 1)
        received = self._to_all(parts).permute(1, 2, 0, 3, 4)
        return [*received.reshape(len(tensors), 1, self.rows, -1, d)]

    def _to_all(self, parts: Tensor) -> Tensor:
        flat = parts.reshape(-1, parts.shape[-2] * parts.shape[-1]).contiguous()
        counts = [len(flat) // self.comm.size] * self.comm.size
        return self.comm.exchange(flat, counts, counts, "rows or heads").wait().view(parts.shape)


PEERS: dict[str, type[PeerScheme]] = {"full ring": FullRing, "ulysses": Ulysses}
