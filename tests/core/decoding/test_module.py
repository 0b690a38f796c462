"""Decoding, and packed sequences, through `MultiheadDilatedAttention`: each result is that of a sequence by itself."""

from __future__ import annotations

import copy
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from dilkit import DilatedAttention, DilatedCache, MultiheadDilatedAttention, Pattern, order

PATTERN = Pattern([8, 24], [1, 3])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": dict(rotary=True),
    "grouped": dict(num_kv_heads=2, rotary=500.0),
    "sink": dict(sink=True, layer_norm=True),
}


def module(inner: Any = None, is_causal: bool = True, **options: Any) -> MultiheadDilatedAttention:
    """A layer with every parameter at random."""
    layer = MultiheadDilatedAttention(16, 4, inner or DilatedAttention(PATTERN, scale=0.4), is_causal=is_causal, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer.double()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@torch.no_grad()
def test_row_by_row_is_the_whole(options: dict[str, Any]) -> None:
    layer, x = module(**options), torch.randn(2, 40, 16, dtype=torch.float64)
    cache = DilatedCache(PATTERN, layer.num_kv_heads)
    found = [layer(x[:, cache.seen : end], cache=cache)[0] for end in (13, 14, 20, *range(21, 41))]
    torch.testing.assert_close(torch.cat(found, 1), layer(x)[0])
    one, alone = DilatedCache(PATTERN, layer.num_kv_heads), x[0]
    found = [layer(alone[one.seen : end], cache=one)[0] for end in (30, 31, 40)]  # without a batch
    torch.testing.assert_close(torch.cat(found), layer(alone)[0])


@torch.no_grad()
def test_positions_may_be_given() -> None:
    layer, x = module(rotary=True), torch.randn(1, 12, 16, dtype=torch.float64)
    positions = torch.arange(5, 17)
    cache = DilatedCache(PATTERN, 4)
    found = [layer(x[:, i : i + 1], cache=cache, positions=positions[i : i + 1])[0] for i in range(12)]
    torch.testing.assert_close(torch.cat(found, 1), layer(x, positions=positions)[0])


OTHER = DilatedCache(Pattern([8], [1]), 4)
MASK = torch.zeros(1, 3, dtype=torch.bool)
WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no cache": (None, dict(cache={}), TypeError, "cache={} is a dict; a dilkit.DilatedCache is needed"),
    "another pattern": (None, dict(cache=OTHER), ValueError, r"cache is of Pattern\(\[8\], \[1\]\), but the inner attention has"),
    "an order": (DilatedAttention(PATTERN, order=order((3,))), {}, ValueError, r"DilatedAttention\(pattern\) is needed"),
    "another module": (torch.nn.Identity(), {}, ValueError, "the inner attention is Identity"),
    "not causal": (None, dict(is_causal=False), ValueError, "decoding is causal"),
    "a mask": (None, dict(key_padding_mask=MASK), ValueError, "key_padding_mask is given with cache"),
}


@pytest.mark.parametrize(("inner", "arguments", "error", "message"), WRONG.values(), ids=WRONG)
@torch.no_grad()
def test_what_a_cache_cannot_do(inner: Any, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    layer, cache = module(inner), DilatedCache(PATTERN, 4)
    with pytest.raises(error, match=message):
        layer(torch.zeros(1, 3, 16, dtype=torch.float64), **{"cache": cache, **arguments})
    assert cache.seen == 0


def test_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match=r"decode under torch\.no_grad\(\)"):
        module()(torch.zeros(1, 3, 16, dtype=torch.float64), cache=DilatedCache(PATTERN, 4))


@torch.no_grad()
def test_a_cache_of_another_layer_is_refused() -> None:
    """Both would add their rows to it."""
    layers, x = [module(), module()], torch.randn(1, 9, 16, dtype=torch.float64)
    cache = DilatedCache(PATTERN, 4)
    layers[0](x[:, :5], cache=cache)
    with pytest.raises(ValueError, match=r"cache has the rows of another layer; .* a cache of its own"):
        layers[1](x[:, :5], cache=cache)
    again = copy.copy(cache)
    torch.testing.assert_close(layers[0](x[:, 5:], cache=cache)[0], layers[0](x)[0][:, 5:])
    layers[1](x[:, 5:], cache=again)  # a copy is anybody's, and so is a cache that is empty or whose layer is gone
    cache.crop(0)
    layers[1](x[:, :5], cache=cache)
    del layers[1]
    layers[0](x[:, 5:], cache=cache)


LENGTHS = [13, 0, 1, 30]
CU = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)
X = torch.randn(44, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_packed_is_one_by_one(options: dict[str, Any]) -> None:
    layer = module(is_causal="rotary" in options, **options)

    def differentiated(out: Tensor) -> list[Tensor]:
        return [out.detach(), *torch.autograd.grad((out.sin() * torch.arange(16)).sum(), list(layer.parameters()))]

    alone = torch.cat([layer(x)[0] for x in X.split(LENGTHS)])
    torch.testing.assert_close(differentiated(layer(X, cu_seqlens=CU, max_seqlen=30)[0]), differentiated(alone))


GRID = DilatedAttention(PATTERN, order=order((4, 11), "morton"))
WRONG_PACKED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a batch": (None, dict(query=X[None]), r"query has shape \(1, 44, 16\); with cu_seqlens \(total, 16\)"),
    "a mask": (None, dict(key_padding_mask=torch.zeros(44, dtype=torch.bool)), "key_padding_mask is given with cu_seqlens"),
    "a cache": (None, dict(cache=DilatedCache(PATTERN, 4), is_causal=True), "cache is given with cu_seqlens"),
    "an order": (GRID, {}, "cu_seqlens is given, but the inner attention is"),
    "a length without starts": (None, dict(cu_seqlens=None, max_seqlen=30), "max_seqlen=30 is given without cu_seqlens"),
    "other rows": (None, dict(cu_seqlens=CU[:-1]), "cu_seqlens ends with 14"),
}


@pytest.mark.parametrize("wrong", WRONG_PACKED)
def test_what_does_not_fit_packed_rows_is_named(wrong: str) -> None:
    inner, changed, text = WRONG_PACKED[wrong]
    for rotary in (False, True):
        with pytest.raises(ValueError, match=text):
            module(inner, is_causal=False, rotary=rotary)(**{**dict(query=X, cu_seqlens=CU), **changed})
