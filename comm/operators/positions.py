"""Positions of a rank's rows in the sequence; `dilkit::positions_over_ranks` is the operator for compiled code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilkit.checks import integer
from dilkit.comm.agreement import agree_on
from dilkit.comm.operators.order import below_autograd, in_order
from dilkit.comm.reorder import fingerprint
from dilkit.comm.transports.base import Comm, transport_of
from dilkit.op.schema import library
from dilkit.op.sequences import check_cu_seqlens
from dilkit.orders.checks import MAX_TOKENS
from dilkit.orders.token_order import TokenOrder

library.define("positions_over_ranks(Tensor like, SymInt rows, str comm, Tensor? after) -> Tensor")
positions_op = torch.ops.dilkit.positions_over_ranks.default


def first_row(
    rows: int,
    comm: Comm,
    device: torch.device | str | None,
    order: TokenOrder | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[int, int]:
    """Return the number of this rank's first row and of all rows. Raises as `positions`, on every rank."""

    def facts() -> dict[str, Any]:
        if integer("rows", rows, at_least=0) > MAX_TOKENS:
            raise ValueError(f"rows={rows} must be at most 2**62")
        try:
            torch.device("cpu" if device is None else device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device={device!r} is not known to torch: {error}") from None
        if cu_seqlens is not None and order is not None:
            raise ValueError("order and cu_seqlens cannot go together; a token order is of one sequence")
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, cu_seqlens, 0)
        starts = "" if cu_seqlens is None else str(cu_seqlens.tolist())
        return dict(rows=int(rows), order=fingerprint(order), cu_seqlens=starts)

    counts = [fact["rows"] for fact in agree_on(comm, facts, "positions of shards", ("rows",))]
    start = sum(counts[: comm.rank])
    return start, sum(counts)


def positions_of(rows: int, comm: Comm, device: torch.device | str | None) -> Tensor:
    """Return the positions of this rank's rows by the operator. `torch.compile` traces this function."""
    like = torch.empty(0, dtype=torch.int64, device=device)  # operators without tensors have no place in their order
    rows_here: Tensor = positions_op(like, rows, comm.handle, None)
    return rows_here


def _positions(like: Tensor, rows: int, handle: str, after: Tensor | None) -> Tensor:
    start, _ = first_row(rows, transport_of(handle), like.device, None)
    return torch.arange(start, start + rows, device=like.device)


library.impl("positions_over_ranks", _positions, "CompositeExplicitAutograd")
library.impl("positions_over_ranks", in_order(below_autograd(positions_op), "forward"), "Autograd")
torch.library.register_fake(
    "dilkit::positions_over_ranks", lambda like, rows, *_: like.new_empty(rows, dtype=torch.int64), lib=library
)
