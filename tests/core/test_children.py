"""Modules call their children."""

from types import SimpleNamespace

import pytest
import torch
from helpers import torchscale_peer
from torch import nn

from dilkit import DilatedAttention, DilatedCache, MultiheadDilatedAttention, Pattern
from dilkit.integrations.dilateformer import MultiDilatelocalAttention
from dilkit.integrations.gigapath import SlideEncoder, SlideEncoderConfig
from dilkit.integrations.gigapath.layers import EncoderLayer
from dilkit.integrations.gigapath.positions import GridPositions
from dilkit.integrations.natten import NeighborhoodAttention2D
from dilkit.integrations.titan import TitanAttention
from dilkit.integrations.torchscale.install import attend

PATTERN = Pattern([4, 8], [1, 2])


def multihead(**options):
    return MultiheadDilatedAttention(12, 3, DilatedAttention(PATTERN), layer_norm=True, is_causal=True, **options)


def titan():
    theirs = nn.Module()
    theirs.num_heads, theirs.pos_encode, theirs.attn_drop_prob = 3, "alibi", 0.0
    theirs.qkv, theirs.proj, theirs.proj_drop = nn.Linear(12, 36), nn.Linear(12, 12), nn.Dropout(0.0)
    theirs.q_norm, theirs.k_norm = nn.LayerNorm(4), nn.LayerNorm(4)
    return theirs


def slide_encoder(**options):
    lengths = (4, 8, 16, 32, 64)
    return SlideEncoder(SlideEncoderConfig(embed_dim=16, depth=2, num_heads=4, in_chans=12, segment_lengths=lengths, **options))


def torchscale_layer():
    args = SimpleNamespace(segment_length=[4, 8], dilated_ratio=[1, 2], layernorm_eps=1e-5)
    return torchscale_peer.DilatedAttention(args, 12, 3, subln=True)


def of_torchscale(layer, x):
    out, _ = attend(SimpleNamespace(tail="exact", mask="apply", backend=None), "", layer, x, x, x)
    return out


X = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0))
STARTS = torch.tensor([0, 3, 8], dtype=torch.int32)
COORDINATES = 256 * torch.arange(16).view(1, 8, 2)
MODULES = {
    "multihead": (multihead, lambda layer: layer(X)[0]),
    "multihead, packed": (multihead, lambda layer: layer(X[0], cu_seqlens=STARTS)[0]),
    "multihead, cached": (multihead, lambda layer: layer(X, cache=DilatedCache(PATTERN, 3))[0]),
    "dilateformer": (lambda: MultiDilatelocalAttention(12, 3), lambda layer: layer(X.view(2, 2, 4, 12))),
    "natten": (lambda: NeighborhoodAttention2D(12, 3, 3), lambda layer: layer(X.view(2, 2, 4, 12))),
    "titan": (titan, lambda layer: TitanAttention.of(layer)(X, COORDINATES[:, :7].float())),
    "class token": (slide_encoder, lambda model: model(X[:1], COORDINATES)[0]),
    "mean of tiles": (lambda: slide_encoder(global_pool=True), lambda model: model(X[:1], COORDINATES)[0]),
    "torchscale": (torchscale_layer, lambda layer: of_torchscale(layer, X)),
}


def changed(out, factor):
    return out + factor * out.roll(1, -1)  # a norm that follows does not undo that


class Adapter(nn.Module):
    """A child and what is added to its output: it has none of the child's attributes."""

    def __init__(self, child, factor):
        super().__init__()
        self.child, self.factor = child, factor

    def forward(self, *inputs, **options):
        return changed(self.child(*inputs, **options), self.factor)


OF_MORE_METHODS = DilatedAttention, EncoderLayer, GridPositions
"""Children that are asked for more than to be called: their place is for their kind."""


def adapted(module, path, factor):
    module.set_submodule(path, Adapter(module.get_submodule(path), factor))


def hooked(module, path, factor):
    module.get_submodule(path).register_forward_hook(lambda child, inputs, out: changed(out, factor))


@pytest.mark.parametrize("change", [adapted, hooked])
@pytest.mark.parametrize("name", MODULES)
def test_children_are_called(name, change):
    make, call = MODULES[name]
    called = {path: child for path, child in make().named_modules() if path and type(child).forward is not nn.Module.forward}
    for path, child in called.items():
        if isinstance(child, (nn.Identity, nn.Dropout)) or (change is adapted and isinstance(child, OF_MORE_METHODS)):
            continue
        torch.manual_seed(0)
        module, factor = make().eval(), torch.zeros((), requires_grad="cached" not in name)
        change(module, path, factor)
        with torch.set_grad_enabled(factor.requires_grad):
            before = call(module)
        if factor.requires_grad:
            (slope,) = torch.autograd.grad((before * torch.randn_like(before)).sum(), factor)
            assert slope.abs() > 1e-6, f"{path} has no gradient"
        with torch.no_grad():
            factor.fill_(1)
            assert not torch.allclose(call(module), before, rtol=1e-2, atol=1e-4), f"{path} has no effect"
