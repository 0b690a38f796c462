"""Several token orders for the heads of a tensor: head h uses order `h mod len(orders)`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dilkit.compiler import assume_constant_result
from dilkit.orders.checks import wrong_length
from dilkit.orders.token_order import TokenOrder, check_order
from dilkit.pattern import Pattern

Orders: TypeAlias = tuple[TokenOrder, ...]


def as_orders(name: str, given: Any) -> Orders:
    """Return one order or a sequence of them as a tuple; of equal ones, one. Raises TypeError or ValueError."""
    orders = (given,) if isinstance(given, TokenOrder) else given
    if not isinstance(orders, (list, tuple)) or not all(isinstance(order, TokenOrder) for order in orders):
        raise TypeError(f"{name}={given!r} is no TokenOrder, nor a list of them; make one with dilkit.order((rows, columns))")
    if not orders:
        raise ValueError(f"{name} is empty; give at least one TokenOrder, or leave it out")
    first = orders[0]
    return (first,) if all(order is first or order == first for order in orders) else tuple(orders)


def order_or_orders(order: TokenOrder | None, orders: Sequence[TokenOrder] | None) -> Orders | None:
    """Return the orders of a module, from its argument `order` or `orders`; None for neither. Raises TypeError or ValueError.

    Warns of different orders that move tokens in the same way, as a generalised Hilbert curve and its transposed curve may.
    """
    if order is not None and orders is not None:
        raise ValueError(f"order={order!r} and orders={orders!r} are both given; give one order, or several as orders")
    if order is not None:
        check_order(order)
        return as_orders("orders", order)
    if orders is None:
        return None
    several = as_orders("orders", orders)
    for one, other in combinations(several, 2):
        if one != other and np.array_equal(one.perm, other.perm):
            warnings.warn(f"{one!r} and {other!r} are the same permutation: heads that use them see the same keys", stacklevel=3)
    return several


def shown_orders(orders: Orders | None) -> dict[str, Any]:
    """Return the argument `order` or `orders` of a module, for its `extra_repr`."""
    return {} if orders is None else {"order": orders[0]} if len(orders) == 1 else {"orders": list(orders)}


def check_orders(orders: Orders, seq: int, kv_heads: int, pattern: Pattern, is_causal: bool) -> None:
    """Raise ValueError unless these orders have `seq` tokens and suit the pattern, the heads, and causality."""
    by_cells = [branch for branch in pattern.branches if branch.goes_by_cells]
    for order in orders:
        if len(order) != seq:
            raise wrong_length(f"the sequence has {seq} tokens", seq, order)
        if by_cells and order.spec is not None and not order.is_identity:
            raise ValueError(
                f"{by_cells[0]} are of cells that lie row by row, and {order!r} puts them along a curve; leave the order out, "
                "or, if the tokens do not lie row by row, give TokenOrder.from_permutation of where each row-major cell lies"
            )
    total = kv_heads if pattern.head_shard is None else pattern.head_shard[1]  # of the whole model
    if len(orders) > total:
        raise ValueError(f"there are {len(orders)} orders but {total} key/value heads; at most one order for each head")
    if not is_causal or all(order.is_identity for order in orders):
        return
    if len(orders) > 1:
        raise ValueError(
            f"is_causal=True with {len(orders)} orders would let tokens see their future: a token that is "
            "earlier in one order is later in another; give one order"
        )
    if not orders[0].is_generation_order:
        raise ValueError(
            f"is_causal=True along {orders[0]!r} would let tokens see their future, as it is not the order of the sequence; if "
            "tokens are generated in this order, pass order(..., is_generation_order=True)"
        )


def first_head(pattern: Pattern) -> int:
    return 0 if pattern.head_shard is None else pattern.head_shard[0]


def used_orders(orders: Orders, first: int, kv_heads: int) -> tuple[Orders, int]:
    """Return the orders that these heads use in turn, and their first head's index: as given, unless some orders are unused."""
    if kv_heads >= len(orders):
        return orders, first
    return tuple(orders[(first + head) % len(orders)] for head in range(kv_heads)), 0


def move_heads(x: Tensor, orders: Orders, first: int, kv_heads: int, inverse: bool = False) -> Tensor:
    """Move the rows of each head of `x` `(batch, seq, heads, ...)`: key/value head j by order `(first + j) mod len(orders)`."""
    parts = group_heads(x, len(orders), first, kv_heads)
    moved = [order.restore(part) if inverse else order.apply(part) for order, part in zip(orders, parts, strict=True)]
    return ungroup_heads(moved, first, kv_heads)


def group_heads(x: Tensor, orders: int, first: int, kv_heads: int) -> list[Tensor]:
    """Group the heads of `x` `(batch, seq, heads, ...)` by order: a view `(batch, seq, heads of the order, ...)` for each."""
    if orders == 1:
        return [x]
    by_kv_head = x.view(*x.shape[:2], kv_heads, x.shape[2] // kv_heads, *x.shape[3:])
    return [by_kv_head[:, :, (index - first) % orders :: orders] for index in range(orders)]


def ungroup_heads(parts: list[Tensor], first: int, kv_heads: int) -> Tensor:
    """Return the inverse of `group_heads`."""
    if len(parts) == 1:
        return parts[0]
    by_order = [part.unbind(2) for part in parts]
    heads = [by_order[(first + head) % len(parts)][head // len(parts)] for head in range(kv_heads)]
    return torch.stack(heads, 2).flatten(2, 3)


class TracedPattern(NamedTuple):
    """Text of a pattern, all that a graph of `torch.compile` needs, which can make no patterns."""

    text: str

    def to_json(self) -> str:
        return self.text


def head_patterns(pattern: Pattern, heads: int, kv_heads: int) -> list[Pattern | None]:
    """Return the pattern for each key/value head alone; None for a head that no branch serves."""
    read: Any = TracedPattern if torch.compiler.is_compiling() else Pattern.from_json
    return [None if text is None else read(text) for text in _traced_head_texts(pattern.to_json(), heads, kv_heads)]


@assume_constant_result
def _traced_head_texts(text: str, heads: int, kv_heads: int) -> tuple[str | None, ...]:
    return _head_texts(text, heads, kv_heads)


@lru_cache(maxsize=256)
def _head_texts(text: str, heads: int, kv_heads: int) -> tuple[str | None, ...]:
    pattern = Pattern.from_json(text)
    patterns = (pattern.of_kv_heads(head, head + 1, heads, kv_heads) for head in range(kv_heads))
    return tuple(None if one is None else one.to_json() for one in patterns)
