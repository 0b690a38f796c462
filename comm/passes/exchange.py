"""Small problems moved whole: rows go to who computes with them, results come back. Backward is the same the other way round."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dilkit.comm.passes.compute import Kernel, Rows
from dilkit.comm.passes.partial import Partial
from dilkit.comm.passes.rows import as_bytes, from_bytes, take
from dilkit.comm.passes.tables import Landing, Slice, Tables
from dilkit.comm.transports.base import Comm, Pending


class Held(NamedTuple):
    """What a rank was sent in the forward pass, and needs again in the backward pass."""

    rows: Tensor
    flags: Tensor | None

    def as_rows(self) -> Rows:
        return Rows(self.rows, self.rows, self.rows, self.flags)


class ForwardExchange:
    """A forward pass: made, it sends queries, keys and values; then `compute()`, then `land(...)`."""

    def __init__(
        self, kernel: Kernel, comm: Comm, tables: Tables, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> None:
        self.kernel, self.comm, self.tables, self.like = kernel, comm, tables, query
        sent, received = tables.sent["qkv"], tables.received["qkv"]
        rows = query.new_empty(sum(sent.counts), query.shape[-1])
        for role, x in zip("qkv", (query, key, value), strict=True):
            _put(rows, tables.packed[role], x)
        self.rows = comm.exchange(rows, sent.counts, received.counts, "queries, keys and values")
        self.flags = None if mask is None else self._send_flags(mask, key.shape[2])

    def _send_flags(self, mask: Tensor, heads: int) -> Pending:
        sent, received = self.tables.sent["k"], self.tables.received["k"]
        flags = mask.new_empty(sum(sent.counts), 1)
        _put(flags, self.tables.packed["kk"], mask[:, :, None, None].expand(*mask.shape, heads, 1).contiguous())
        return self.comm.exchange(flags, sent.counts, received.counts, "key_padding_mask")

    def compute(self) -> Held:
        """Compute with what this rank is sent, and send the results."""
        held = Held(self.rows.wait(), None if self.flags is None else self.flags.wait().view(-1))
        sent, received = self.tables.sent["q"], self.tables.received["q"]
        found = Partial.empty(sum(received.counts), self.like.shape[-1], self.like)
        for call in self.tables.calls:
            self.kernel.join(found, call, held.as_rows())
        results = as_bytes(found.out.to(self.like.dtype), found.lse[:, None])
        self.results = self.comm.exchange(results, received.counts, sent.counts, "results")
        return held

    def land(self, out: Tensor, lse: Tensor) -> None:
        """Join the results to `out` `(batch, seq, heads, head_dim)` and `lse` `(batch, seq, heads)`, both contiguous."""
        landing, d = self.tables.results, out.shape[-1]
        there, lse_there = from_bytes(self.results.wait(), (d, out.dtype), (1, lse.dtype))
        out, lse = out.view(-1, d), lse.view(-1)
        found = Partial(out[landing.rows], lse[landing.rows])
        for piece in landing.slices:
            part = slice(piece.start, piece.start + len(piece.rows))
            found.join(piece.rows, there[part], lse_there[part, 0])
        out[landing.rows], lse[landing.rows] = found.out.to(out.dtype), found.lse


class BackwardExchange:
    """A backward pass: made, it sends what the computing ranks need of `dout`; then `compute(...)`, then `land(...)`."""

    def __init__(self, kernel: Kernel, comm: Comm, tables: Tables, dout: Tensor, out: Tensor, lse: Tensor) -> None:
        """`dout` and `out` `(batch, seq, heads, head_dim)`; `lse` `(batch, seq, heads)`."""
        self.kernel, self.comm, self.tables = kernel, comm, tables
        self.kinds = (dout.shape[-1], dout.dtype), (out.shape[-1], out.dtype), (1, lse.dtype)
        sent, received = tables.sent["q"], tables.received["q"]
        columns = []
        for x in (dout, out, lse[..., None]):
            rows = x.new_empty(sum(sent.counts), x.shape[-1])
            _put(rows, tables.packed["qq"], x)
            columns.append(rows)
        self.rows = comm.exchange(as_bytes(*columns), sent.counts, received.counts, "results and their gradients")

    def compute(self, held: Held) -> None:
        """Compute gradients for what this rank was sent, and send them home."""
        dout, out, lse = from_bytes(self.rows.wait(), *self.kinds)
        grads, dqueries = lse.new_zeros(held.rows.shape), lse.new_zeros(dout.shape)
        for call in self.tables.calls:
            found = self.kernel.backward(call, held.as_rows(), dout, out, lse[:, 0])
            (results, dquery), (keys, dkey, dvalue) = found
            dqueries[results] += dquery
            grads[call.keys[keys]] += dkey
            grads[call.values[keys]] += dvalue
        for call in self.tables.calls:  # a query meets the keys of several calls, perhaps
            grads[call.queries] = dqueries[call.results]
        sent, received = self.tables.sent["qkv"], self.tables.received["qkv"]
        self.grads = self.comm.exchange(
            grads.to(dout.dtype), received.counts, sent.counts, "gradients of queries, keys and values"
        )

    def land(self, dquery: Tensor, dkey: Tensor, dvalue: Tensor) -> None:
        """Add to the gradients, contiguous `(batch, seq, heads, head_dim)`, what others computed."""
        rows = self.grads.wait()
        for role, grad in zip("qkv", (dquery, dkey, dvalue), strict=True):
            _add(grad.view(-1, grad.shape[-1]), self.tables.gradients[role], rows)


def _put(rows: Tensor, pieces: list[Slice], x: Tensor) -> None:
    """The rows of `x` where messages want them."""
    for piece in pieces:
        rows[piece.start : piece.start + len(piece.rows)] = take(x, piece.rows)


def _add(grad: Tensor, landing: Landing, rows: Tensor) -> None:
    """Add up in fp32, one rank and branch after the other, so that sums are the same each time."""
    wide = grad.dtype if grad.dtype == torch.float64 else torch.float32
    total = grad[landing.rows].to(wide)
    for piece in landing.slices:
        total[piece.rows] += rows[piece.start : piece.start + len(piece.rows)]
    grad[landing.rows] = total.to(grad.dtype)
