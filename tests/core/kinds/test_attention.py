"""Branches of every kind through what is built on attention: weights, token orders, modules, compilers, caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.calls import tensors
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dilkit import (
    BlockSparse,
    DilatedAttention,
    DilatedCache,
    DilatedSegment,
    GlobalTokens,
    Neighborhood,
    Pattern,
    PatternError,
    SlidingWindow,
    TokenOrder,
    attention_mass,
    attention_rows,
    dilated_attention,
    dilated_attention_varlen,
    order,
    ordered_dilated_attention,
    plan,
)

SEQ = 26
PATTERN = Pattern.of(DilatedSegment(16, 4), SlidingWindow(3), GlobalTokens(2))


def test_tables_that_outgrow_the_cache_are_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = Pattern.of(BlockSparse(np.random.default_rng(0).random((512, 512)) < 0.5, 1))
    rows = tensors(seq=512, heads=1, kv_heads=1, batch=1, head_dim=1)
    plan.cache_clear()
    monkeypatch.setenv("DILKIT_CACHE_BYTES", str(2**22))
    with pytest.warns(UserWarning, match="made anew at each call; DILKIT_CACHE_BYTES=[0-9]+ keeps them") as told:
        dilated_attention(*rows, pattern, backend="native")
    monkeypatch.setenv("DILKIT_CACHE_BYTES", str(told[0].message).split("DILKIT_CACHE_BYTES=")[1].split()[0])
    dilated_attention(*rows, pattern, backend="native")
    misses = plan.cache_info().misses
    dilated_attention(*rows, pattern, backend="native")
    assert plan.cache_info().misses == misses


def test_what_looks_at_weights_knows_every_kind() -> None:
    q, k, _ = tensors(seq=SEQ, kv_heads=2, dtype=torch.float64)
    whole = attention_rows(q, k, PATTERN, range(SEQ))
    identity = torch.eye(SEQ, dtype=torch.float64).expand(2, 2, SEQ, SEQ).transpose(1, 2)
    wide, keys = (torch.nn.functional.pad(x, (0, SEQ - 8)) for x in (q, k))
    expected = dilated_attention(wide, keys, identity, PATTERN, scale=8**-0.5).transpose(1, 2)
    torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(attention_mass(q, k, PATTERN), whole.sum(2))


def test_token_orders_take_every_kind() -> None:
    q, k, v = tensors(seq=24, kv_heads=2, dtype=torch.float64)
    orders = order((4, 6), "hilbert"), order((4, 6), "morton")
    found = ordered_dilated_attention(q, k, v, PATTERN, orders)
    for head, one in enumerate(orders):
        place = torch.from_numpy(one.rank.copy())
        count = PATTERN.count(24, 4, kv_heads=2)[2 * head : 2 * head + 2][:, place][:, :, place]
        own = (x.transpose(1, 2) for x in (q[:, :, 2 * head : 2 * head + 2], k[:, :, [head]], v[:, :, [head]]))
        right = scaled_dot_product_attention(*own, attn_mask=count.double().log(), enable_gqa=True).transpose(1, 2)
        torch.testing.assert_close(found[:, :, 2 * head : 2 * head + 2], right)


def test_neighborhoods_of_cells_do_not_go_along_a_curve() -> None:
    q, k, v = tensors(seq=24, kv_heads=2, dtype=torch.float64)
    pattern, curve = Pattern.natten((4, 6), 3), order((4, 6))
    for orders in (curve, [order((24,)), curve]):
        with pytest.raises(
            ValueError, match=r"neighborhoods of 3 x 3 .* row by row, and order\(\(4, 6\), 'hilbert'\) puts them along"
        ):
            ordered_dilated_attention(q, k, v, pattern, orders)
    along = [curve.apply(x) for x in (q, k, v)]  # tokens that lie along the curve, and an order that puts them row by row
    rows = TokenOrder.from_permutation(curve.rank)
    expected = curve.apply(dilated_attention(q, k, v, pattern))
    torch.testing.assert_close(ordered_dilated_attention(*along, pattern, rows), expected)
    for fitting in (Pattern.natten((4, 6), 3), Pattern.of(Neighborhood(24, 3))):
        ordered_dilated_attention(q, k, v, fitting, order((24,)))
    assert ordered_dilated_attention(q, k, v, Pattern.of(Neighborhood(24, 3)), curve).shape == q.shape  # a window along it


BEYOND = Pattern.of(SlidingWindow(3), GlobalTokens([1, 16]))


class Whole(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return dilated_attention(query, key, value, BEYOND)


def exported() -> Any:
    sizes = {1: torch.export.Dim("seq", min=2)}
    return torch.export.export(Whole(), tuple(tensors(seq=20)), dynamic_shapes=(sizes,) * 3).module()


WAYS: dict[str, Callable[[], Any]] = {
    "function": lambda: partial(dilated_attention, pattern=BEYOND),
    "module": lambda: DilatedAttention(BEYOND),
    "order": lambda: lambda q, k, v: ordered_dilated_attention(q, k, v, BEYOND, order((q.shape[1],))),
    "vmap": lambda: torch.func.vmap(lambda q, k, v: Whole()(q[None], k[None], v[None])[0]),
    "compiled": lambda: torch.compile(Whole(), fullgraph=True, dynamic=False, backend="eager"),
    "compiled for all lengths": lambda: torch.compile(Whole(), fullgraph=True, dynamic=True, backend="eager"),
    "exported for all lengths": exported,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_whole_sequence_without_a_global_token_is_refused(way: str) -> None:
    call = WAYS[way]()
    for seq in (17, 20):
        call(*tensors(seq=seq))
    with pytest.raises(PatternError, match="seq=16: tokens has position 16; positions from 0 to 15 are needed"):
        call(*tensors(seq=16))


def test_a_global_token_that_may_yet_come_is_taken() -> None:
    """Packed sequences take it, too."""
    inputs = tensors(batch=1, seq=16)
    starts = torch.tensor([0, 6, 16], dtype=torch.int32)
    short = Pattern.of(SlidingWindow(3), GlobalTokens([1]))
    for call in (
        partial(dilated_attention, is_causal=True),
        lambda q, k, v, pattern: dilated_attention_varlen(q[0], k[0], v[0], pattern, starts),
        lambda q, k, v, pattern: DilatedCache(pattern, kv_heads=k.shape[2]).attend(q, k, v),
    ):
        torch.testing.assert_close(call(*inputs, pattern=BEYOND), call(*inputs, pattern=short))
