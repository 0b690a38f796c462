"""Decoding, and packed sequences, through `MultiheadDilatedAttention`."""

import copy

import pytest
import torch
from helpers.calls import starts_of

from dilkit import DilatedAttention, DilatedCache, MultiheadDilatedAttention, Pattern

PATTERN = Pattern([8, 24], [1, 3])
OPTIONS = {
    "plain": {},
    "rotary": dict(rotary=True),
    "grouped": dict(num_kv_heads=2, rotary=500.0),
    "sink": dict(sink=True, layer_norm=True),
}


def module(inner=None, is_causal: bool = True, **options) -> MultiheadDilatedAttention:
    layer = MultiheadDilatedAttention(16, 4, inner or DilatedAttention(PATTERN, scale=0.4), is_causal=is_causal, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer.double()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@torch.no_grad()
def test_row_by_row_is_the_whole(options):
    layer, x = module(**options), torch.randn(2, 40, 16, dtype=torch.float64)
    cache = DilatedCache(PATTERN, layer.num_kv_heads)
    found = [layer(x[:, cache.seen : end], cache=cache)[0] for end in (13, 14, 20, *range(21, 41))]
    torch.testing.assert_close(torch.cat(found, 1), layer(x)[0])
    one, alone = DilatedCache(PATTERN, layer.num_kv_heads), x[0]
    found = [layer(alone[one.seen : end], cache=one)[0] for end in (30, 31, 40)]  # without a batch
    torch.testing.assert_close(torch.cat(found), layer(alone)[0])


@torch.no_grad()
def test_positions_may_be_given():
    layer, x = module(rotary=True), torch.randn(1, 12, 16, dtype=torch.float64)
    positions = torch.arange(5, 17)
    cache = DilatedCache(PATTERN, 4)
    found = [layer(x[:, i : i + 1], cache=cache, positions=positions[i : i + 1])[0] for i in range(12)]
    torch.testing.assert_close(torch.cat(found, 1), layer(x, positions=positions)[0])


@torch.no_grad()
def test_a_cache_of_another_layer_is_refused():
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
CU = starts_of(LENGTHS)
X = torch.randn(44, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_packed_is_one_by_one(options):
    layer = module(is_causal="rotary" in options, **options)

    def differentiated(out):
        return [out.detach(), *torch.autograd.grad((out.sin() * torch.arange(16)).sum(), list(layer.parameters()))]

    alone = torch.cat([layer(x)[0] for x in X.split(LENGTHS)])
    torch.testing.assert_close(differentiated(layer(X, cu_seqlens=CU, max_seqlen=30)[0]), differentiated(alone))
