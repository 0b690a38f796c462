"""`RingDilatedAttention`: dilated attention over ranks as a module, the inner attention of `MultiheadDilatedAttention`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.checks import boolean, one_of
from dilkit.comm.attention import ring_dilated_attention
from dilkit.comm.plan.exchange_plan import KEEPS, SCHEDULES
from dilkit.comm.shards import positions
from dilkit.comm.transports.base import Comm, check_comm
from dilkit.nn.attention import BiasedModule, appended
from dilkit.orders.heads import shown_orders
from dilkit.orders.token_order import TokenOrder
from dilkit.pattern import Pattern


class RingDilatedAttention(BiasedModule):
    """`ring_dilated_attention` as a module, without parameters but a bias.

    Given to `MultiheadDilatedAttention` as its inner attention, it computes on shards `(batch, rows, embed_dim)` what the same
    module with `DilatedAttention(pattern)` computes on the whole sequence. Its own inputs are `(batch, rows, heads, head_dim)`.

    The arguments are those of `ring_dilated_attention`. `order` is one token order, `orders` several that the heads use in turn:
    shards are of the row-major sequence, and rows travel to their places along the orders and back. `bias` is kept as
    `DilatedAttention` keeps it, with the same state dict, and added unless `forward` is given another; the gradient of its
    weights is of what the rank computes: sum it over ranks.

    Raises TypeError or ValueError for arguments that do not fit, such as a schedule that is not known.

        >>> import torch
        >>> from dilkit import MultiheadDilatedAttention, Pattern
        >>> from dilkit.comm import RingDilatedAttention, run_threads, shard
        >>> pattern, tokens = Pattern([8, 16], [1, 2]), torch.randn(1, 16, 32)  # (batch, seq, embed_dim)
        >>> def on_rank(comm):
        ...     layer = MultiheadDilatedAttention(32, 4, RingDilatedAttention(pattern, comm), rotary=True)
        ...     out, _ = layer(shard(tokens, comm, pattern))
        ...     return tuple(out.shape)
        >>> run_threads(2, on_rank)
        [(1, 8, 32), (1, 8, 32)]
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
        bias: Bias | None = None,
        softcap: float | None = None,
        keep: str = "rows",
    ) -> None:
        super().__init__(pattern, order=order, orders=orders, scale=scale, bias=bias, softcap=softcap, backend=backend)
        check_comm(comm)
        one_of("schedule", schedule, SCHEDULES)
        one_of("keep", keep, KEEPS)
        boolean("fuse_branches", fuse_branches)
        self.comm, self.schedule, self.fuse_branches, self.keep = comm, schedule, fuse_branches, keep

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        key_padding_mask: Tensor | None = None,
        sink: Tensor | None = None,
        dropout_p: float = 0.0,
        bias: Bias | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute `ring_dilated_attention` of this rank's rows `(batch, rows, heads, head_dim)`; `bias` replaces the module's."""
        return ring_dilated_attention(
            query,
            key,
            value,
            self.pattern,
            self.comm,
            is_causal=is_causal,
            key_padding_mask=key_padding_mask,
            sink=sink,
            scale=self.scale,
            dropout_p=dropout_p,
            backend=self.backend,
            schedule=self.schedule,
            fuse_branches=self.fuse_branches,
            order=self.orders,
            bias=self.bias if bias is None else bias,
            softcap=self.softcap,
            keep=self.keep,
            return_lse=return_lse,
        )

    def positions(self, rows: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's rows in the sequence, `(rows,)`, for rotary embeddings."""
        return positions(rows, self.comm, device)

    def extra_repr(self) -> str:
        others = {"bias": self.of_model and type(self.of_model).__name__, "softcap": self.softcap}
        others["keep"] = None if self.keep == "rows" else self.keep
        changed = appended({name: value for name, value in others.items() if value is not None})
        orders = "".join(f", {name}={value!r}" for name, value in shown_orders(self.orders).items())
        return f"{self.pattern}{orders}, rank {self.comm.rank} of {self.comm.size}, schedule={self.schedule!r}{changed}"
