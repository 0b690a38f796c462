"""Dilated attention along token orders: it moves the rows, computes the pattern as usual, and moves the result back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.checks import boolean
from dilkit.inputs import Inputs
from dilkit.op.arguments import call_of, check_inputs
from dilkit.op.boundary import lse_dtype
from dilkit.op.call_options import CallOptions
from dilkit.op.operators import attend
from dilkit.op.scores import Scores, placed_along
from dilkit.orders.heads import as_orders, check_orders, first_head, head_patterns, move_heads
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
    boolean("return_lse", return_lse)
    inputs = Inputs(query, key, value, key_padding_mask, sink=sink)
    check_inputs(inputs, pattern)
    inputs, options, _ = call_of(inputs, pattern, is_causal, scale, backend, dropout_p, bias, softcap)
    heads, first = key.shape[2], first_head(pattern)
    check_orders(orders, query.shape[1], heads, pattern, is_causal)
    if all(order.is_identity for order in orders):
        out, lse = attend(inputs, options)
        return (out, lse) if return_lse else out
    moved = [move_heads(x, orders, first, heads) for x in (query, key, value)]
    if len(orders) == 1 or (key_padding_mask is None and inputs.bias is None):
        in_order = inputs._replace(query=moved[0], key=moved[1], value=moved[2])
        out, lse = attend(*_beside_in_order(in_order, options, orders[0]))
    else:
        out, lse = _head_by_head(inputs, moved, options, [orders[(first + head) % len(orders)] for head in range(heads)])
    out = move_heads(out, orders, first, heads, inverse=True)
    if not return_lse:
        return out
    return out, move_heads(lse.transpose(1, 2), orders, first, heads, inverse=True).transpose(1, 2).contiguous()


def _beside_in_order(inputs: Inputs, options: CallOptions, order: TokenOrder) -> tuple[Inputs, CallOptions]:
    if inputs.key_padding_mask is not None:
        inputs = inputs._replace(key_padding_mask=order.apply(inputs.key_padding_mask))
    if inputs.bias is not None:
        bias = placed_along(Scores(inputs.bias), order.apply, inputs.query.shape[1]).bias
        inputs, options = inputs._replace(bias=bias), options._replace(bias=None if bias is None else bias.form)
    return inputs, options


def _head_by_head(
    inputs: Inputs, moved: Sequence[Tensor], options: CallOptions, orders: Sequence[TokenOrder]
) -> tuple[Tensor, Tensor]:
    kv_heads = inputs.key.shape[2]

    def attend_head(head: int, rows: tuple[Tensor, ...], pattern: Pattern, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        query, key, value = rows
        bias = Scores(inputs.bias).of_part(head, kv_heads).bias
        call = inputs._replace(query=query, key=key, value=value, sink=sink, bias=bias)
        return attend(*_beside_in_order(call, options._replace(pattern=pattern), orders[head]))

    return each_head(attend_head, moved, options.pattern, inputs.sink)


def each_head(
    attend_head: Callable[[int, tuple[Tensor, ...], Pattern, Tensor | None], tuple[Tensor, Tensor]],
    rows: Sequence[Tensor],
    pattern: Pattern,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute `(out, lse)` of query, key and value one key/value head after the other: of its number, rows, pattern and sinks."""
    query, key, _ = rows
    kv_heads = key.shape[2]
    sinks = [None] * kv_heads if sink is None else sink.tensor_split(kv_heads)
    patterns = head_patterns(pattern, query.shape[2], kv_heads)
    split = zip(*(x.tensor_split(kv_heads, 2) for x in rows), strict=True)
    results = [
        nothing(part[0], one_sink) if one is None else attend_head(head, part, one, one_sink)
        for head, (part, one, one_sink) in enumerate(zip(split, patterns, sinks, strict=True))
    ]
    return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 1)


def nothing(query: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` of queries that no branch serves: 0 and -inf or the sink, differentiable, with gradient 0."""
    every = torch.ones_like(query, dtype=torch.bool)
    lse = query[..., 0].transpose(1, 2).to(lse_dtype(query.dtype))
    lse = lse.masked_fill(every[..., 0].transpose(1, 2), -math.inf if sink is None else 0.0)
    return query.masked_fill(every, 0.0), lse if sink is None else lse + sink.to(lse.dtype)[:, None]
