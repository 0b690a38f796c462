"""Token orders over ranks: rows of the row-major sequence travel to the rank that holds their place along an order, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dilkit.comm.passes.autograd import differentiable_once
from dilkit.comm.passes.row_index import pack_columns, unpack_columns
from dilkit.comm.transports.base import Comm
from dilkit.orders.heads import Orders, group_heads, ungroup_heads
from dilkit.orders.token_order import TokenOrder, check_order


@dataclass(frozen=True)
class MessageRows:
    """Rows in messages: message row a is row `rows[a]`; row i is message row `places[i]`; `counts[t]` are of rank t."""

    rows: Tensor
    places: Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True)
class ReorderPlan:
    """Moves a rank's rows of the row-major sequence to their places along an order; messages are by rank and then by place."""

    row_major: MessageRows
    along: MessageRows

    @property
    def nbytes(self) -> int:
        return sum(side.rows.nbytes + side.places.nbytes for side in (self.row_major, self.along))


def reorder_plan(order: TokenOrder, cuts: tuple[int, ...], rank: int, device: torch.device) -> ReorderPlan:
    """Return the plan of a rank that holds rows `cuts[rank] .. cuts[rank + 1] - 1` in either order, from the pattern cache."""
    kept: ReorderPlan = order.kept(("moves", cuts, rank, device), partial(_reorder_plan, order, cuts, rank, device))
    return kept


def _reorder_plan(order: TokenOrder, cuts: tuple[int, ...], rank: int, device: torch.device) -> ReorderPlan:
    first, last = cuts[rank : rank + 2]
    own_places = np.flatnonzero((order.perm >= first) & (order.perm < last))  # of the rows that are here, ascending
    sent = np.diff(np.searchsorted(own_places, cuts))
    incoming = order.perm[first:last]
    source = np.searchsorted(cuts[1:], incoming, side="right")
    arrival = np.argsort(source, kind="stable").astype(incoming.dtype)
    received = np.bincount(source, minlength=len(cuts) - 1)
    row_major = _message_rows(order.perm[own_places] - first, sent, device)
    return ReorderPlan(row_major, _message_rows(arrival, received, device))


def _message_rows(rows: Any, counts: Any, device: torch.device) -> MessageRows:
    places = np.empty_like(rows)
    places[rows] = np.arange(len(rows), dtype=rows.dtype)
    with torch.inference_mode(False):
        numbers = [torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (rows, places)]
        return MessageRows(numbers[0], numbers[1], tuple(counts.tolist()))


@dataclass(frozen=True)
class Reordering:
    """The reordering of heads over the ranks of `comm`, each along the order that it uses (`dilkit.orders.heads`)."""

    comm: Comm
    orders: Orders
    cuts: tuple[int, ...]
    first: int
    kv_heads: int

    def apply(self, tensors: list[Tensor], inverse: bool, step: str) -> list[Tensor]:
        """Return `tensors` `(batch, rows, heads, ...)` along the orders, or back if `inverse`, by a message from rank to rank."""
        dealt = zip(*(group_heads(x, len(self.orders), self.first, self.kv_heads) for x in tensors), strict=True)
        plans = [reorder_plan(order, self.cuts, self.comm.rank, tensors[0].device) for order in self.orders]
        routes = [(plan.along, plan.row_major) if inverse else (plan.row_major, plan.along) for plan in plans]
        by_order = [list(parts) for parts in dealt]
        tables = [
            pack_columns(*(x.index_select(1, source.rows).transpose(0, 1).reshape(len(source.rows), _width(x)) for x in parts))
            for parts, (source, _) in zip(by_order, routes, strict=True)
        ]
        arrived = self._exchange(tables, routes, step)
        moved = []
        for table, parts, (_, target) in zip(arrived, by_order, routes, strict=True):
            columns = unpack_columns(table.index_select(0, target.places), *((_width(x), x.dtype) for x in parts))
            shapes = [(x.shape[1], x.shape[0], *x.shape[2:]) for x in parts]
            moved.append([y.view(shape).transpose(0, 1).contiguous() for y, shape in zip(columns, shapes, strict=True)])
        return [ungroup_heads(list(parts), self.first, self.kv_heads) for parts in zip(*moved, strict=True)]

    def _exchange(self, tables: list[Tensor], routes: list[tuple[MessageRows, MessageRows]], step: str) -> list[Tensor]:
        """Send tables of bytes, one row a token and in the order of messages, to the ranks; returns what was received, alike."""
        widths = [table.shape[1] for table in tables]
        sent = [[n * width for n in source.counts] for (source, _), width in zip(routes, widths, strict=True)]
        received = [[n * width for n in target.counts] for (_, target), width in zip(routes, widths, strict=True)]
        pieces = [torch.split(table.view(-1), sizes) for table, sizes in zip(tables, sent, strict=True)]
        message = torch.cat([piece for to_rank in zip(*pieces, strict=True) for piece in to_rank])
        send_counts, recv_counts = ([sum(sizes) for sizes in zip(*side, strict=True)] for side in (sent, received))
        arrived = self.comm.exchange(message[:, None], send_counts, recv_counts, step).wait().view(-1)
        parts = torch.split(arrived, [size for from_rank in zip(*received, strict=True) for size in from_rank])
        return [torch.cat(parts[i :: len(tables)]).view(-1, width) for i, width in enumerate(widths)]


def _width(x: Tensor) -> int:
    return x[:, :1].numel()


class _Reorder(torch.autograd.Function):
    """`Reordering.apply`. What is not floating-point, a mask, travels along without gradients; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, reordering: Reordering, inverse: bool, step: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        with reordering.comm.broken_by_errors():
            moved = reordering.apply(list(tensors), inverse, step)
        ctx.mark_non_differentiable(*(x for x in moved if not x.is_floating_point()))
        ctx.set_materialize_grads(False)
        ctx.reordering, ctx.inverse, ctx.step = reordering, inverse, f"gradients of {step}"
        ctx.kinds = [dict(size=x.shape, dtype=x.dtype, device=x.device) for x in moved if x.is_floating_point()]
        return tuple(moved)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
        reordering, grads = ctx.reordering, list(given[: len(ctx.kinds)])
        here = [grad is not None for grad in grads]
        with reordering.comm.broken_by_errors():
            # Without the inverse the same gradients are there on every rank: of those inputs of which any rank asks for them.
            wanted = [True] if ctx.inverse else here
            if ctx.inverse and len(grads) > 1:
                flags = reordering.comm.share(bytes(here), "which results are in the loss")
                wanted = [any(of_ranks) for of_ranks in zip(*flags, strict=True)]
            sent = [i for i in range(len(grads)) if wanted[i]]
            tensors = [torch.zeros(**ctx.kinds[i]) if grads[i] is None else grads[i] for i in sent]
            gradients = dict(zip(sent, reordering.apply(tensors, not ctx.inverse, ctx.step), strict=True))
        return None, None, None, *(gradients.get(i) for i in range(len(given)))


def reorder_inputs(reordering: Reordering, rows: list[Tensor], mask: Tensor | None) -> tuple[list[Tensor], list[Tensor | None]]:
    """Query, key and value along their orders, and the mask `(batch, rows)` along each order; differentiable."""
    several = len(reordering.orders) > 1
    tensors = rows
    if mask is not None:  # as rows that travel with the heads: each of several orders needs its own
        tensors = [*rows, mask[:, :, None].expand(-1, -1, reordering.kv_heads if several else 1)]
    reordered = _Reorder.apply(reordering, False, "rows put in order", *tensors)  # type: ignore[no-untyped-call]
    if mask is None:
        return list(reordered), [None] * reordering.kv_heads
    *moved, masks = reordered
    return moved, [masks[:, :, head if several else 0].contiguous() for head in range(reordering.kv_heads)]


def reorder_positions(reordering: Reordering, positions: Tensor) -> list[Tensor]:
    """Move positions `(batch or 1, rows, dims)` along the order of each key/value head; they have no gradients."""
    several = len(reordering.orders) > 1
    by_head = positions[:, :, None].expand(-1, -1, reordering.kv_heads if several else 1, -1)
    with reordering.comm.broken_by_errors():
        (moved,) = reordering.apply([by_head], False, "positions put in order")
    return [moved[:, :, head if several else 0].contiguous() for head in range(reordering.kv_heads)]


def restore_outputs(reordering: Reordering, *results: Tensor) -> list[Tensor]:
    """Move results `(batch, rows, heads, ...)` back into row-major order; differentiable."""
    moved = _Reorder.apply(reordering, True, "results put back in order", *results)  # type: ignore[no-untyped-call]
    return list(moved)


def fingerprint(order: TokenOrder | None) -> str:
    """Return a text by which ranks compare token orders; empty for None. Raises TypeError for no TokenOrder."""
    if order is None:
        return ""
    check_order(order)
    return order.text or f"{order!r} {sha256(order.perm.tobytes()).hexdigest()[:32]}"
