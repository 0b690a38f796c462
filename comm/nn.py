"""The module: dilated attention over ranks, as the inner attention of `MultiheadDilatedAttention`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dilkit.checks import boolean, one_of, real
from dilkit.comm.attention import ring_dilated_attention
from dilkit.comm.plan.exchange_plan import SCHEDULES
from dilkit.comm.shards import positions
from dilkit.comm.transports.base import Comm, check_comm
from dilkit.orders.heads import order_or_orders, shown_orders
from dilkit.orders.token_order import TokenOrder
from dilkit.pattern import Pattern


class RingDilatedAttention(nn.Module):
    """`ring_dilated_attention` as a module without parameters; arguments as there.

        MultiheadDilatedAttention(embed_dim, num_heads, RingDilatedAttention(pattern, comm))

    computes on shards `(batch, rows, embed_dim)` what the same module with `DilatedAttention(pattern)` computes on the whole.
    `order` or `orders` as there: shards are of the row-major sequence, and rows travel there and back.
    """

    def __init__(
        self,
        pattern: Pattern,
        comm: Comm,
        *,
        order: TokenOrder | None = None,
        orders: Sequence[TokenOrder] | None = None,
        scale: float | None = None,
        backend: str | Sequence[str] | None = None,
        schedule: str = "auto",
        fuse_branches: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(pattern, Pattern):
            raise TypeError(f"pattern={pattern!r} is a {type(pattern).__name__}; a dilkit.Pattern is needed")
        check_comm(comm)
        one_of("schedule", schedule, SCHEDULES)
        boolean("fuse_branches", fuse_branches)
        self.pattern, self.comm, self.schedule, self.fuse_branches = pattern, comm, schedule, fuse_branches
        self.scale = None if scale is None else real("scale", scale)
        self.backend = backend
        self.orders = order_or_orders(order, orders)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        key_padding_mask: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`ring_dilated_attention` of this rank's rows, on tensors `(batch, rows, heads, head_dim)`."""
        return ring_dilated_attention(
            query,
            key,
            value,
            self.pattern,
            self.comm,
            is_causal=is_causal,
            key_padding_mask=key_padding_mask,
            scale=self.scale,
            backend=self.backend,
            schedule=self.schedule,
            fuse_branches=self.fuse_branches,
            order=self.orders,
            return_lse=return_lse,
        )

    @torch.compiler.disable
    def positions(self, rows: int, device: torch.device) -> Tensor:
        """Where this rank's rows are in the sequence, `(rows,)`: what rotary positions are reckoned from."""
        return positions(rows, self.comm, device)

    def extra_repr(self) -> str:
        orders = "".join(f", {name}={value!r}" for name, value in shown_orders(self.orders).items())
        return f"{self.pattern}{orders}, rank {self.comm.rank} of {self.comm.size}, schedule={self.schedule!r}"
