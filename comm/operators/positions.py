"""`dilkit::positions_over_ranks`: `positions` as compiled code calls it."""

from __future__ import annotations

import torch
from torch import Tensor

from dilkit.comm.operators.order import below_autograd, in_order
from dilkit.comm.row_positions import first_row
from dilkit.comm.transports.base import Comm
from dilkit.comm.transports.handles import transport_of
from dilkit.op.schema import library

library.define("positions_over_ranks(Tensor like, SymInt rows, str comm, Tensor? after) -> Tensor")
positions_op = torch.ops.dilkit.positions_over_ranks.default


def positions_of(rows: int, comm: Comm, device: torch.device | str | None) -> Tensor:
    """The positions of this rank's rows, by the operator. `torch.compile` traces this function."""
    like = torch.empty(0, dtype=torch.int64, device=device)  # operators without tensors have no place in their order
    found: Tensor = positions_op(like, rows, comm.handle, None)
    return found


def _positions(like: Tensor, rows: int, handle: str, after: Tensor | None) -> Tensor:
    start, _ = first_row(rows, transport_of(handle), like.device, None)
    return torch.arange(start, start + rows, device=like.device)


library.impl("positions_over_ranks", _positions, "CompositeExplicitAutograd")
library.impl("positions_over_ranks", in_order(below_autograd(positions_op), "forward"), "Autograd")
torch.library.register_fake(
    "dilkit::positions_over_ranks", lambda like, rows, *_: like.new_empty(rows, dtype=torch.int64), lib=library
)
