"""Dilated attention along token orders: it moves the rows, computes the pattern as usual, and moves the result back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.checks import boolean
from dilkit.keywords import refusing
from dilkit.op.arguments import check_inputs, encode_arguments, further_arguments
from dilkit.op.boundary import lse_dtype
from dilkit.op.operators import attend
from dilkit.op.schema import with_pattern
from dilkit.op.scores import placed_along, scores_of
from dilkit.orders.heads import as_orders, check_orders, first_head, head_texts, move_heads
from dilkit.orders.token_order import TokenOrder
from dilkit.pattern import Pattern


@refusing
def ordered_dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    order: TokenOrder | Sequence[TokenOrder],
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    bias: Bias | None = None,
    softcap: float | None = None,
    backend: str | Sequence[str] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Do `dilated_attention` with the pattern along a token order: segments, dilation and causality follow the order.

        out = restore(attention(apply(query), apply(key), apply(value)))
        count[h, i, j] = the pattern's count[h, rank[i], rank[j]]

    Tensors and `key_padding_mask` are in row-major order, and so is the result. Rotary and other positions that the rows contain
    already move with them. Where the pattern lets every token see every other one, nothing but rounding changes.

    - `order`: one `TokenOrder` of `seq` tokens, or a sequence of them. With several, key/value head h of the model and the
      query heads that share it use `order[h % len(order)]` (with `Pattern.head_shard`, h counts all heads of the model). One call
      of the kernel computes all heads. With a `key_padding_mask`, which then differs between heads, each key/value head is one
      call.
    - `is_causal`: a token sees the tokens before it in the order. Unless tokens are generated in this order
      (`order(..., is_generation_order=True)`), these include its own future, so every order but the identity is refused, and so
      are several orders.

    - `bias`: positions are those of the rows as they are given, row-major, whatever the order; coordinates move with their rows.
      With several orders each key/value head is one call.

    The other arguments, the results and the errors are those of `dilated_attention`. Dropout goes by places in the
    order. Raises ValueError for an order of another length than the sequence, and for a curve through a grid where the pattern
    has neighborhoods (`Neighborhood`), which are of cells that lie row by row.

    Example, an image of 8 x 8 tokens along the Hilbert curve:

        >>> import torch
        >>> from dilkit import Pattern, dilated_attention, order, ordered_dilated_attention
        >>> hilbert, pattern = order((8, 8)), Pattern([16, 64], [1, 2])
        >>> q, k, v = torch.randn(3, 1, 64, 2, 8).unbind()
        >>> out = ordered_dilated_attention(q, k, v, pattern, hilbert)
        >>> by_hand = hilbert.restore(dilated_attention(hilbert.apply(q), hilbert.apply(k), hilbert.apply(v), pattern))
        >>> torch.equal(out, by_hand)
        True
    """
    orders = as_orders("order", order)
    check_inputs(query, key, value, pattern, key_padding_mask, sink)
    boolean("return_lse", return_lse)
    scores = scores_of(bias, softcap, query, pattern, key.shape[2])
    if len(orders) == 1 and not orders[0].is_identity:
        scores = placed_along(scores, orders[0].apply, query.shape[1])
    factor, call = encode_arguments(query, key, value, pattern, is_causal, scale, backend, dropout_p, scores)
    options = further_arguments(dropout_p, scores=scores)
    heads, first = key.shape[2], first_head(pattern)
    check_orders(orders, query.shape[1], heads, pattern, is_causal)
    if all(order.is_identity for order in orders):
        out, lse = attend(query, key, value, key_padding_mask, factor, call, sink, *options)
        return (out, lse) if return_lse else out
    query, key, value = (move_heads(x, orders, first, heads) for x in (query, key, value))
    if len(orders) == 1 or (key_padding_mask is None and scores.bias is None):
        mask = None if key_padding_mask is None else orders[0].apply(key_padding_mask)
        out, lse = attend(query, key, value, mask, factor, call, sink, *options)
    else:
        by_head = [orders[(first + head) % len(orders)] for head in range(heads)]
        masks = [None if key_padding_mask is None else order.apply(key_padding_mask) for order in by_head]
        head_options = [options] * heads
        if scores.bias is not None:
            placed = [placed_along(scores, order.apply, query.shape[1]) for order in by_head]
            _, call = encode_arguments(query, key, value, pattern, is_causal, scale, backend, dropout_p, placed[0])
            head_options = [(*options[:4], *one.of_part(head, heads).tensors) for head, one in enumerate(placed)]
        out, lse = _head_by_head(query, key, value, masks, pattern, factor, call, sink, head_options)
    out = move_heads(out, orders, first, heads, inverse=True)
    if not return_lse:
        return out
    return out, move_heads(lse.transpose(1, 2), orders, first, heads, inverse=True).transpose(1, 2).contiguous()


def _head_by_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Sequence[Tensor | None],
    pattern: Pattern,
    factor: float,
    call: str,
    sink: Tensor | None,
    head_options: Sequence[tuple[Any, ...]],
) -> tuple[Tensor, Tensor]:
    """Compute all heads, with a mask and `head_options` of `attend` for each key/value head."""
    rows = (x.tensor_split(key.shape[2], 2) for x in (query, key, value))
    texts = head_texts(pattern.to_json(), query.shape[2], key.shape[2])
    sinks = sink_by_head(sink, key.shape[2])
    heads_out = [
        nothing(q, logits) if text is None else attend(q, k, v, mask, factor, with_pattern(call, text), logits, *options)
        for q, k, v, mask, text, logits, options in zip(*rows, masks, texts, sinks, head_options, strict=True)
    ]
    return torch.cat([out for out, _ in heads_out], 2), torch.cat([lse for _, lse in heads_out], 1)


def sink_by_head(sink: Tensor | None, kv_heads: int) -> Sequence[Tensor | None]:
    """Split the sinks into those of each key/value head's query heads."""
    return [None] * kv_heads if sink is None else sink.tensor_split(kv_heads)


def nothing(query: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` of queries that no branch serves: 0 and -inf or the sink, differentiable, with gradient 0."""
    every = torch.ones_like(query, dtype=torch.bool)
    lse = query[..., 0].transpose(1, 2).to(lse_dtype(query.dtype))
    lse = lse.masked_fill(every[..., 0].transpose(1, 2), -math.inf if sink is None else 0.0)
    return query.masked_fill(every, 0.0), lse if sink is None else lse + sink.to(lse.dtype)[:, None]
