"""Packed sequences through `MultiheadDilatedAttention`: each is what the module computes of it alone."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from dilkit import DilatedAttention, DilatedCache, MultiheadDilatedAttention, Pattern, order

PATTERN = Pattern([8, 24], [1, 3])
LENGTHS = [13, 0, 1, 30]
CU = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)
X = torch.randn(44, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal rotary": dict(rotary=True, is_causal=True),
    "grouped": dict(num_kv_heads=2, rotary=500.0),
    "sink": dict(sink=True, layer_norm=True),
}


def module(inner: Any = None, **options: Any) -> MultiheadDilatedAttention:
    """A layer with every parameter at random."""
    layer = MultiheadDilatedAttention(16, 4, inner or DilatedAttention(PATTERN, scale=0.4), **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer.double()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_packed_is_one_by_one(options: dict[str, Any]) -> None:
    layer = module(**options)

    def differentiated(out: Tensor) -> list[Tensor]:
        return [out.detach(), *torch.autograd.grad((out.sin() * torch.arange(16)).sum(), list(layer.parameters()))]

    alone = torch.cat([layer(x)[0] for x in X.split(LENGTHS)])
    torch.testing.assert_close(differentiated(layer(X, cu_seqlens=CU, max_seqlen=30)[0]), differentiated(alone))


GRID = DilatedAttention(PATTERN, order=order((4, 11), "morton"))
WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a batch": (None, dict(query=X[None]), r"query has shape \(1, 44, 16\); with cu_seqlens \(total, 16\)"),
    "a mask": (None, dict(key_padding_mask=torch.zeros(44, dtype=torch.bool)), "key_padding_mask is given with cu_seqlens"),
    "a cache": (None, dict(cache=DilatedCache(PATTERN, 4), is_causal=True), "cache is given with cu_seqlens"),
    "an order": (GRID, {}, "cu_seqlens is given, but the inner attention is"),
    "a length without starts": (None, dict(cu_seqlens=None, max_seqlen=30), "max_seqlen=30 is given without cu_seqlens"),
    "other rows": (None, dict(cu_seqlens=CU[:-1]), "cu_seqlens ends with 14"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_named(wrong: str) -> None:
    inner, changed, text = WRONG[wrong]
    for rotary in (False, True):
        with pytest.raises(ValueError, match=text):
            module(inner, rotary=rotary)(**{**dict(query=X, cu_seqlens=CU), **changed})
