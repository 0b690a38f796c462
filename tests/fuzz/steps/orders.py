"""Token orders and points."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from fuzz.calls import Call, leaves, results, tensors_of
from fuzz.checks import attempt, require, require_right
from fuzz.steps.ranks import TIMEOUT
from helpers.ranks import over_ranks
from torch import Tensor

import dilkit
from dilkit import TokenOrder
from dilkit.orders.points import decode, encode
from dilkit.registry import backends
from dilkit.testing.accuracy import Results
from dilkit.testing.tensors import Tensors


def order(world, shape: Sequence[int], curve: str, options: dict[str, Any]):
    _check_permutation(attempt(lambda: dilkit.order(shape, curve, **options)))


def permutation(world, perm: list[Any], extra_tokens: int):
    made = attempt(lambda: TokenOrder.from_permutation(perm, extra_tokens=extra_tokens))
    require((made is not None) == (sorted(perm) == list(range(len(perm))) and perm != []), f"{perm} is taken for {made}")
    _check_permutation(made)


def points(world, coords: list[list[int]], bits: int | None, curve: str, dtype: str):
    array = attempt(lambda: np.array(coords, dtype), (*_NO_ARRAY,))
    if array is None:
        return
    spread = np.repeat(array, 2, axis=0)[::2]  # with strides
    codes = attempt(lambda: encode(spread, bits, curve))
    if codes is not None and bits is not None:
        require(np.array_equal(decode(codes, spread.shape[1], bits, curve), array), f"{array} is not decoded")
    _check_permutation(attempt(lambda: dilkit.sort_points(spread, curve)))


_NO_ARRAY = (ValueError, TypeError, OverflowError)


def ordered(world, call: dict[str, Any], shape: Sequence[int], curves: Sequence[str], cut: int):
    one = Call.from_data(call)
    kv_heads = one.case.kv_heads or one.case.heads
    orders = [dilkit.order(shape, curve) for curve in curves][:kv_heads]
    several = any(other != orders[0] for other in orders)
    case = replace(one.case, seq=len(orders[0]), is_causal=False, mask="none" if several else one.case.mask)
    case = replace(case, values="normal" if several else case.values)
    refused = backends()[one.backend].refusals(case.problem())  # drawn for the call, whose sequence has another length
    one = replace(one, case=case, hooks="none", backend="reference" if refused else one.backend)
    tensors = tensors_of(one)
    if 0 < cut < case.seq:
        one, tensors = replace(one, wants=(True,) * 3), replace(tensors, dlse=None)
        found = over_ranks(tensors, case.pattern, [0, cut, case.seq], scale=case.scale, order=orders, timeout=TIMEOUT).results
    else:
        found = _found(one, tensors, orders)

    def moved(x):
        return _moved(x, orders, one, several)

    if "lse" in found:
        found["lse"] = moved(found["lse"].transpose(1, 2)).transpose(1, 2).contiguous()
    found |= {name: moved(x) for name, x in found.items() if name not in ("lse", "dsink")}
    require_right(one, _tensors_moved(tensors, moved, orders), found)


def _found(one: Call, tensors: Tensors, orders: list[TokenOrder]) -> Results:
    options = dict(key_padding_mask=tensors.mask, scale=one.case.scale, backend=one.backend)
    inputs = leaves(one, tensors)
    options |= dict(zip(("sink",), inputs[3:], strict=False))
    outputs = dilkit.ordered_dilated_attention(*inputs[:3], one.case.pattern, orders, return_lse=True, **options)
    return results(one, tensors, outputs, inputs)


def _moved(x: Tensor, orders: Sequence[TokenOrder], one: Call, several: bool) -> Tensor:
    """`(batch, seq, heads, ...)` with the rows of each head where its order has them."""
    if not several:
        return orders[0].apply(x)
    first = 0 if one.case.pattern.head_shard is None else one.case.pattern.head_shard[0]
    group = x.shape[2] // (one.case.kv_heads or one.case.heads)
    parts = [orders[(first + head // group) % len(orders)].apply(x.select(2, head)) for head in range(x.shape[2])]
    return torch.stack(parts, 2)


def _tensors_moved(tensors: Tensors, moved: Callable[[Tensor], Tensor], orders: Sequence[TokenOrder]) -> Tensors:
    q, k, v, dout = (moved(x) for x in (*tensors.qkv, tensors.dout))
    mask = None if tensors.mask is None else orders[0].apply(tensors.mask)
    dlse = None if tensors.dlse is None else moved(tensors.dlse.transpose(1, 2)).transpose(1, 2)
    return Tensors(q, k, v, mask, dout, dlse, tensors.sink)


def _check_permutation(made: TokenOrder | None):
    if made is None:
        return
    tokens = torch.arange(len(made))
    require(sorted(made.perm.tolist()) == tokens.tolist(), f"{made} is no permutation")
    require(torch.equal(made.restore(made.apply(tokens[None])), tokens[None]), f"{made} does not restore")
