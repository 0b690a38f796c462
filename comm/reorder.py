"""Rows put in another order over ranks: each rank has a part of the row-major sequence, and gets as large a part of another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dilkit.comm.passes.rows import as_bytes, from_bytes
from dilkit.comm.transports.base import Comm
from dilkit.orders.heads import Orders, collect_heads, deal_heads
from dilkit.orders.token_order import TokenOrder


@dataclass(frozen=True)
class Side:
    """What goes between a rank's rows and messages: message row a is row `rows[a]`; row i is message row `places[i]`.

    `counts[t]` of the message's rows are for, or from, rank t.
    """

    rows: Tensor
    places: Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Moves:
    """How a rank's rows of the row-major sequence become its rows along an order, in messages by rank and then by place."""

    row_major: Side
    along: Side

    @property
    def nbytes(self) -> int:
        return sum(side.rows.nbytes + side.places.nbytes for side in (self.row_major, self.along))


def moves_of(order: TokenOrder, cuts: tuple[int, ...], rank: int, device: torch.device) -> Moves:
    """The moves of rank `rank`, whose rows are `cuts[rank] .. cuts[rank + 1] - 1` in either order; kept with the plans."""
    kept: Moves = order.kept(("moves", cuts, rank, device), partial(_moves_of, order, cuts, rank, device))
    return kept


def _moves_of(order: TokenOrder, cuts: tuple[int, ...], rank: int, device: torch.device) -> Moves:
    first, last = cuts[rank : rank + 2]
    own_places = np.flatnonzero((order.perm >= first) & (order.perm < last))  # of the rows that are here, ascending
    sent = np.diff(np.searchsorted(own_places, cuts))
    coming = order.perm[first:last]
    source = np.searchsorted(cuts[1:], coming, side="right")
    arrival = np.argsort(source, kind="stable").astype(coming.dtype)
    received = np.bincount(source, minlength=len(cuts) - 1)
    return Moves(_side(order.perm[own_places] - first, sent, device), _side(arrival, received, device))


def _side(rows: Any, counts: Any, device: torch.device) -> Side:
    places = np.empty_like(rows)
    places[rows] = np.arange(len(rows), dtype=rows.dtype)
    with torch.inference_mode(False):
        to_device = (torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (rows, places))
        return Side(*to_device, tuple(counts.tolist()))


@dataclass(frozen=True)
class Reordering:
    """Heads whose rows move over the ranks of `comm`, each by the order that it takes (`dilkit.orders.heads`)."""

    comm: Comm
    orders: Orders
    cuts: tuple[int, ...]
    first: int
    kv_heads: int

    def carry(self, tensors: list[Tensor], inverse: bool, step: str) -> list[Tensor]:
        """`tensors` `(batch, rows, heads, ...)` into the orders, or back if `inverse`, in one message from each rank to each.

        `heads` is a multiple of `kv_heads`, or, where there is one order, any number.
        """
        dealt = zip(*(deal_heads(x, len(self.orders), self.first, self.kv_heads) for x in tensors), strict=True)
        routes = [self._route(order, tensors[0].device, inverse) for order in self.orders]
        by_order = [list(parts) for parts in dealt]
        tables = [_packed(parts, source.rows) for parts, (source, _) in zip(by_order, routes, strict=True)]
        arrived = self._exchange(tables, routes, step)
        moved = [
            _unpacked(table.index_select(0, target.places), parts)
            for table, parts, (_, target) in zip(arrived, by_order, routes, strict=True)
        ]
        return [collect_heads(list(parts), self.first, self.kv_heads) for parts in zip(*moved, strict=True)]

    def _route(self, order: TokenOrder, device: torch.device, inverse: bool) -> tuple[Side, Side]:
        moves = moves_of(order, self.cuts, self.comm.rank, device)
        return (moves.along, moves.row_major) if inverse else (moves.row_major, moves.along)

    def _exchange(self, tables: list[Tensor], routes: list[tuple[Side, Side]], step: str) -> list[Tensor]:
        """Tables of bytes, a row a token and in the order of messages, to the ranks; what came, alike."""
        widths = [table.shape[1] for table in tables]
        sent = [[n * width for n in source.counts] for (source, _), width in zip(routes, widths, strict=True)]
        received = [[n * width for n in target.counts] for (_, target), width in zip(routes, widths, strict=True)]
        pieces = [table.view(-1).split(sizes) for table, sizes in zip(tables, sent, strict=True)]
        message = torch.cat([piece for to_rank in zip(*pieces, strict=True) for piece in to_rank])
        totals = [[sum(sizes) for sizes in zip(*side, strict=True)] for side in (sent, received)]
        came = self.comm.exchange(message[:, None], *totals, step).wait().view(-1)
        parts = came.split([size for from_rank in zip(*received, strict=True) for size in from_rank])
        return [torch.cat(parts[i :: len(tables)]).view(-1, width) for i, width in enumerate(widths)]


def _packed(parts: list[Tensor], rows: Tensor) -> Tensor:
    """Rows `rows` of tensors `(batch, n, ...)`, side by side as bytes."""
    return as_bytes(*(x.index_select(1, rows).transpose(0, 1).reshape(len(rows), _width(x)) for x in parts))


def _unpacked(table: Tensor, like: list[Tensor]) -> list[Tensor]:
    """What `_packed` packed of tensors like these."""
    columns = from_bytes(table, *((_width(x), x.dtype) for x in like))
    shapes = [(x.shape[1], x.shape[0], *x.shape[2:]) for x in like]
    return [column.view(shape).transpose(0, 1).contiguous() for column, shape in zip(columns, shapes, strict=True)]


def _width(x: Tensor) -> int:
    return x[:, :1].numel()


class _Carried(torch.autograd.Function):
    """`Reordering.carry`. What is no number, a mask, travels along without gradients; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, job: Reordering, inverse: bool, step: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        with job.comm.failing_for_good():
            found = job.carry(list(tensors), inverse, step)
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        ctx.set_materialize_grads(False)
        ctx.job, ctx.inverse, ctx.step = job, inverse, f"gradients of {step}"
        ctx.kinds = [(x.shape, x.dtype, x.device) for x in found if x.is_floating_point()]
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
        job, grads = ctx.job, list(given[: len(ctx.kinds)])
        with job.comm.failing_for_good():
            wanted = _on_any_rank(job.comm, [grad is not None for grad in grads]) if ctx.inverse and len(grads) > 1 else grads
            sent = [i for i in range(len(grads)) if wanted[i] is not False]
            tensors = [_zeros(*ctx.kinds[i]) if grads[i] is None else grads[i] for i in sent]
            found = dict(zip(sent, job.carry(tensors, not ctx.inverse, ctx.step), strict=True))
        return None, None, None, *(found.get(i) for i in range(len(given)))


def _on_any_rank(comm: Comm, said: list[bool]) -> list[bool]:
    """What at least one rank says: that a result is in its loss."""
    return [any(told) for told in zip(*comm.share(bytes(said), "which results are in the loss"), strict=True)]


def _zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def along_orders(job: Reordering, rows: list[Tensor], mask: Tensor | None) -> tuple[list[Tensor], list[Tensor | None]]:
    """Query, key and value along their orders, and the mask `(batch, rows)` along each order; differentiable."""
    tensors = rows if mask is None else [*rows, _for_heads(mask, job)]
    found = _Carried.apply(job, False, "rows put in order", *tensors)
    if mask is None:
        return list(found), [None] * job.kv_heads
    *moved, masks = found
    return moved, [masks[:, :, head if len(job.orders) > 1 else 0].contiguous() for head in range(job.kv_heads)]


def row_major(job: Reordering, *results: Tensor) -> list[Tensor]:
    """Results `(batch, rows, heads, ...)` back from their orders; differentiable."""
    return list(_Carried.apply(job, True, "results put back in order", *results))


def _for_heads(mask: Tensor, job: Reordering) -> Tensor:
    """A mask as rows that travel with the heads, `(batch, rows, heads)`: orders need one each."""
    return mask[:, :, None].expand(-1, -1, job.kv_heads if len(job.orders) > 1 else 1)


def told_of(order: TokenOrder) -> str:
    """What ranks compare to know that they have the same order: what it is made from, or a digest of its permutation."""
    if order.text is not None:
        return order.text
    return f"{order!r} {sha256(order.perm.tobytes()).hexdigest()[:32]}"
