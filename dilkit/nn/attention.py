"""Dilated attention alone, as a module without parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from dilkit.attention import dilated_attention
from dilkit.checks import real
from dilkit.op.arguments import check_pattern
from dilkit.orders.attention import ordered_dilated_attention
from dilkit.orders.heads import order_or_orders, shown_orders
from dilkit.orders.token_order import TokenOrder
from dilkit.pattern import Pattern
from dilkit.selector import names_of


class DilatedAttention(nn.Module):
    """`dilkit.dilated_attention` as a module without parameters: the inner attention of `MultiheadDilatedAttention`.

        out[i] = softmax_j(scale * q_i . k_j + log count[h, i, j]) . v

    `pattern`, `scale` and `backend` are those of `dilkit.dilated_attention`. With `order`, a `dilkit.order` of the grid that the
    tokens come from, or several `orders`, which the heads use in turn, it is `dilkit.ordered_dilated_attention`. Raises
    TypeError or ValueError, naming the argument, for a pattern, a scale or orders that do not fit.

    Example:

        >>> import torch
        >>> from dilkit import DilatedAttention, Pattern
        >>> attention = DilatedAttention(Pattern([16, 64], [1, 4]))
        >>> q = k = v = torch.randn(2, 64, 4, 8)  # (batch, seq, heads, head_dim)
        >>> attention(q, k, v, is_causal=True).shape
        torch.Size([2, 64, 4, 8])
        >>> attention
        DilatedAttention(Pattern([16, 64], [1, 4]))
    """

    def __init__(
        self,
        pattern: Pattern,
        *,
        order: TokenOrder | None = None,
        orders: Sequence[TokenOrder] | None = None,
        scale: float | None = None,
        backend: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        check_pattern(pattern)
        self.pattern = pattern
        self.orders = order_or_orders(order, orders)
        self.scale = None if scale is None else real("scale", scale)
        if backend is not None:
            names_of(backend)  # raises for what are no names
        self.backend = backend

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
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`dilated_attention(query, key, value, self.pattern, ...)`, on tensors `(batch, seq, heads, head_dim)`."""
        options: dict[str, Any] = dict(
            is_causal=is_causal,
            key_padding_mask=key_padding_mask,
            sink=sink,
            scale=self.scale,
            dropout_p=dropout_p,
            backend=self.backend,
            return_lse=return_lse,
        )
        if self.orders is not None:
            return ordered_dilated_attention(query, key, value, self.pattern, self.orders, **options)
        return dilated_attention(query, key, value, self.pattern, **options)

    def extra_repr(self) -> str:
        options = {**shown_orders(self.orders), "scale": self.scale, "backend": self.backend}
        return str(self.pattern) + appended({name: value for name, value in options.items() if value is not None})


def appended(options: dict[str, Any]) -> str:
    """`options` behind other arguments, for `extra_repr`."""
    return "".join(f", {name}={value!r}" for name, value in options.items())
