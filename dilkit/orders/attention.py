"""Dilated attention along token orders: rows are moved, the pattern is computed as ever, and the result is moved back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dilkit.attention import check_inputs, told
from dilkit.checks import boolean
from dilkit.op.operators import forward_op, lse_dtype
from dilkit.op.schema import with_pattern
from dilkit.orders.heads import as_orders, check_orders, first_head, head_texts, move_heads
from dilkit.orders.token_order import TokenOrder
from dilkit.pattern import Pattern


def ordered_dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    order: TokenOrder | Sequence[TokenOrder],
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    backend: str | Sequence[str] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`dilated_attention` with the pattern laid along a token order: segments, strides and causality go by its places.

        out = restore(attention(apply(query), apply(key), apply(value)))
        count[h, i, j] = the pattern's count[h, rank[i], rank[j]]

    Tensors and `key_padding_mask` come in row-major order, and so does the result. Rotary and other positions that are in the
    rows already move along. Where the pattern lets every token see every other one, nothing but rounding changes.

    Of a sequence of orders, heads take one each in turn: key/value head h of a model, and the query heads that it serves, goes
    by `order[h % len(order)]` (with `Pattern.head_shard`, h counts all heads of the model). All heads are computed in one call
    of the kernel, but with a `key_padding_mask`, which then differs from head to head, in one for each key/value head.

    With `is_causal` a token sees those before it in the order. Unless tokens are generated that way
    (`order(..., is_generation_order=True)`) these include its own future, so any other order than the identity is refused, and
    so are several. The other arguments, results and errors are those of `dilated_attention`; ValueError for an order that is
    not as long as the sequence.
    """
    orders = as_orders("order", order)
    check_inputs(query, key, value, pattern, key_padding_mask)
    boolean("return_lse", return_lse)
    factor, call = told(query, key, value, pattern, is_causal, scale, backend)
    heads, first = key.shape[2], first_head(pattern)
    check_orders(orders, query.shape[1], heads, pattern, is_causal)
    if all(order.is_identity for order in orders):
        out, lse = forward_op(query, key, value, key_padding_mask, factor, call)
        return (out, lse) if return_lse else out
    query, key, value = (move_heads(x, orders, first, heads) for x in (query, key, value))
    if key_padding_mask is None or len(orders) == 1:
        mask = None if key_padding_mask is None else orders[0].apply(key_padding_mask)
        out, lse = forward_op(query, key, value, mask, factor, call)
    else:
        by_order = [order.apply(key_padding_mask) for order in orders]
        masks = [by_order[(first + head) % len(orders)] for head in range(heads)]
        out, lse = _head_by_head(query, key, value, masks, pattern, factor, call)
    out = move_heads(out, orders, first, heads, inverse=True)
    if not return_lse:
        return out
    return out, move_heads(lse.transpose(1, 2), orders, first, heads, inverse=True).transpose(1, 2).contiguous()


def _head_by_head(
    query: Tensor, key: Tensor, value: Tensor, masks: list[Tensor], pattern: Pattern, factor: float, call: str
) -> tuple[Tensor, Tensor]:
    """All heads, with a mask for each key/value head."""
    rows = (x.tensor_split(key.shape[2], 2) for x in (query, key, value))
    texts = head_texts(pattern.to_json(), query.shape[2], key.shape[2])
    found = [
        nothing(q) if text is None else forward_op(q, k, v, mask, factor, with_pattern(call, text))
        for q, k, v, mask, text in zip(*rows, masks, texts, strict=True)
    ]
    return torch.cat([out for out, _ in found], 2), torch.cat([lse for _, lse in found], 1)


def nothing(query: Tensor) -> tuple[Tensor, Tensor]:
    """What queries find that no branch serves; differentiable, with the gradient 0."""
    every = torch.ones_like(query, dtype=torch.bool)
    lse = query[..., 0].transpose(1, 2).to(lse_dtype(query.dtype))
    return query.masked_fill(every, 0.0), lse.masked_fill(every[..., 0].transpose(1, 2), -math.inf)
