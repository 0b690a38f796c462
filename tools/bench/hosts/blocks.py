"""Attention of a rank's queries to whole shards of keys, one shard after the other, by dilkit's kernels.

Shards are equally long and begin segments: every segment lies within a shard, or is several of them. A rank's own shard is then
seen by the pattern with segments no longer than that, and the shard of another rank through each longer segment that holds both:
there, the kept queries of one see all kept keys of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dilkit.comm.passes.partial_results import PartialResults, merge_rows
from dilkit.comm.passes.rows import add_rows, collect_rows
from dilkit.op.operators import backward_op, encode_call, forward_op
from dilkit.pattern import DilatedSegment, Pattern
from dilkit.problem import Problem

WIDE = torch.float32
"""What results and gradients are added up in."""


@dataclass(frozen=True)
class ShardAttention:
    """Attention on rank `rank` of `ranks`; tensors are `(1, rows, heads, head_dim)`, `lse` `(1, rows, heads)`.

    Raises ValueError for a problem whose shards do not fit its segments.
    """

    problem: Problem
    ranks: int
    rank: int

    def __post_init__(self) -> None:
        p, rows = self.problem, self.rows
        plain = (p.batch, p.kv_heads, p.is_causal, p.key_padding_mask) == (1, p.heads, False, False)
        apart = [b for b in self.branches if rows % b[1] or (rows % b[0] and b[0] % rows)]
        lengths, rates = [w for w, _ in self.branches], [r for _, r in self.branches]
        of_segments = bool(lengths) and p.pattern == Pattern(lengths, rates)
        if p.seq % self.ranks or not plain or apart or not of_segments:
            raise ValueError(
                f"{p.pattern} over {self.ranks} ranks, {p.seq} tokens: whole shards are sent of one sequence, without causality "
                "and mask, in equal shards that segments begin with and that all rates divide"
            )

    @property
    def rows(self) -> int:
        """Tokens of a shard."""
        return self.problem.seq // self.ranks

    @property
    def branches(self) -> list[tuple[int, int]]:
        """Segment lengths and rates, of branches that have them."""
        branches = self.problem.pattern.branches
        return [(b.segment_length, b.dilation_rate) for b in branches if isinstance(b, DilatedSegment)]

    def own(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """`out`, in fp32, and `lse` of the queries with the keys of their own shard."""
        out, lse = forward_op(query, key, value, None, self.problem.scale, self._own_call)
        return out.to(WIDE), lse.transpose(1, 2).contiguous()

    def add(self, out: Tensor, lse: Tensor, query: Tensor, keys_values: Tensor, other: int) -> None:
        """Merge what the queries see of the keys and values `(2, rows, heads, head_dim)` of rank `other`."""
        for rate in self._shared(other):
            rows, (q, k, v) = self._kept(rate, query, *keys_values)
            found, found_lse = forward_op(q, k, v, None, self.problem.scale, self._dense_call)
            found_lse = found_lse.transpose(1, 2).reshape(-1)
            merge_rows(out, lse, rows, PartialResults(found.reshape(len(rows), -1), found_lse))

    def own_gradients(self, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
        """Gradients of queries, keys and values through their own shard, in fp32; `out` and `lse` are of all keys."""
        tensors = (dout, query, key, value, out, lse.transpose(1, 2).contiguous())
        return [x.to(WIDE) for x in backward_op(*tensors, None, self.problem.scale, self._own_call)[:3]]

    def add_gradients(
        self, dquery: Tensor, dout: Tensor, query: Tensor, keys_values: Tensor, out: Tensor, lse: Tensor, other: int
    ) -> Tensor:
        """The gradients of the keys and values of rank `other`, in fp32; those of the queries are added to `dquery`."""
        found = torch.zeros_like(keys_values, dtype=WIDE)
        for rate in self._shared(other):
            rows, (q, k, v, g, o) = self._kept(rate, query, *keys_values, dout, out)
            of_rows = lse.reshape(-1)[rows].view(1, -1, self.problem.heads).transpose(1, 2).contiguous()
            grads = backward_op(g, q, k, v, o, of_rows, None, self.problem.scale, self._dense_call)[:3]
            for whole, part in zip((dquery, found[0][None], found[1][None]), grads, strict=True):
                add_rows(whole, rows, part.reshape(len(rows), -1))
        return found

    @cached_property
    def _own_call(self) -> str:
        return self._call(Pattern([min(w, self.rows) for w, _ in self.branches], [r for _, r in self.branches]))

    @cached_property
    def _dense_call(self) -> str:
        return self._call(Pattern.dense())

    def _call(self, pattern: Pattern) -> str:
        return encode_call(pattern, False, self.problem.requires_grad, "")

    def _shared(self, other: int) -> list[int]:
        """The rates of segments that hold the shards of both ranks."""
        first = min(self.rank, other) * self.rows, max(self.rank, other) * self.rows
        return [r for w, r in self.branches if w > self.rows and first[0] // w == first[1] // w]

    def _kept(self, rate: int, *tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The numbers of the kept rows of a shard, and these of each tensor `(1, rows / rate, heads, head_dim)`."""
        heads = torch.arange(self.problem.heads)
        rows = (torch.arange(0, self.rows, rate)[:, None] + heads % rate) * self.problem.heads + heads
        kept = rows.view(-1)
        shape = 1, self.rows // rate, self.problem.heads, self.problem.head_dim
        return kept, [collect_rows(x.view(1, *x.shape[-3:]), kept).view(shape) for x in tensors]
