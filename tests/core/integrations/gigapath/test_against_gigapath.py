"""The slide encoder against GigaPath's own, unmodified, where DILKIT_GIGAPATH names a checkout of prov-gigapath.

Its attention calls flash-attn, in whose place a plain softmax stands here. It needs einops and fairscale; timm and
huggingface_hub, of which it uses a list of names, a function of training and a download, are stand-ins.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
import types
import warnings
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
from helpers.slide_encoder import embeddings, places

from dilkit.integrations.gigapath import ARCHITECTURES, SlideEncoder, SlideEncoderConfig, install

CHECKOUT = os.environ.get("DILKIT_GIGAPATH", "")
pytestmark = pytest.mark.skipif(not CHECKOUT, reason="DILKIT_GIGAPATH names no checkout of prov-gigapath")
SIZES = dict(embed_dim=64, depth=2, in_chans=24)


def plain_softmax(q, k, v, dropout=0.0, bias=None, scale=None, is_causal=False):
    """What flash-attn computes: the result, and the logarithm of the softmax's denominator."""
    scores = torch.einsum("blhd,bmhd->bhlm", q * q.shape[-1] ** -0.5, k)
    return torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.fixture(scope="module")
def theirs():
    """Makes GigaPath's encoder with these segment lengths and pooling."""
    for module in ("einops", "fairscale"):
        pytest.importorskip(module, reason=f"{module}, which GigaPath's encoder imports, is not installed")
    assert Path(CHECKOUT, "gigapath", "slide_encoder.py").is_file(), f"DILKIT_GIGAPATH={CHECKOUT} is no checkout of prov-gigapath"
    names = ("timm", "timm.models", "timm.models.registry", "timm.models.layers", "huggingface_hub")
    stand_ins = {name: types.ModuleType(name) for name in names}
    stand_ins["timm.models.registry"].register_model = lambda function: function
    stand_ins["timm.models.layers"].drop_path = lambda x, rate, training: x  # in eval mode
    numpy_2 = mock.patch.object(builtins, "np", numpy, create=True)  # it evaluates a text with np.int64 in it
    path, modules = mock.patch.object(sys, "path", [CHECKOUT, *sys.path]), mock.patch.dict(sys.modules, stand_ins)
    with path, modules, numpy_2, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = importlib.import_module("gigapath.slide_encoder")
        sys.modules["torchscale.component.multihead_attention"].flash_attn_func = plain_softmax
        known = sys.modules["torchscale.model.LongNetConfig"]
        known.LongNet_2_layers_64_dim = dict(known.LongNet_12_layers_256_dim, encoder_layers=2, encoder_embed_dim=64)
        known.LongNet_2_layers_64_dim["encoder_ffn_embed_dim"] = 256

        def make(lengths, global_pool):
            norm = lambda dim: torch.nn.LayerNorm(dim, eps=1e-6)  # noqa: E731  as its architectures have it
            model = code.LongNetViT(**SIZES, slide_ngrids=20, global_pool=global_pool, norm_layer=norm).double().eval()
            model.encoder.args.segment_length = list(lengths)
            for weight in model.parameters():
                weight.data += 0.3 * torch.randn_like(weight)
            return model

        yield make


def in_double():
    """Its activation function rounds to single precision whatever the model's dtype is, unless this has no effect."""
    return mock.patch.object(torch.Tensor, "float", lambda x: x)


@pytest.mark.parametrize("global_pool", [False, True])
@pytest.mark.parametrize("lengths", [(16, 32, 64, 128, 256), (16, 32, 48, 64, 80)])
@pytest.mark.parametrize("n", [1, 7, 15, 31, 40, 41, 62, 63, 130])
def test_every_layer_is_theirs(theirs, n, lengths, global_pool):
    torch.manual_seed(n)
    model = theirs(lengths, global_pool)
    config = SlideEncoderConfig(**SIZES, ngrids=20, segment_lengths=lengths, global_pool=global_pool)
    ours = SlideEncoder(config, dtype=torch.float64).eval()
    assert ours.state_dict().keys() == model.state_dict().keys()
    ours.load_state_dict(model.state_dict())
    tiles, coords = torch.randn(1, n, 24, dtype=torch.float64), places(n)
    with torch.no_grad(), in_double():
        right = [*model(tiles, coords, all_layer_embed=True), *model(tiles, coords)]
    with torch.no_grad():
        found = [*ours(tiles, coords, all_layer_embed=True), *ours(tiles, coords)]
        procedure = embeddings(model.state_dict(), config, tiles[0], coords[0])
    assert len(found) == len(right) == 4
    for one, same, other in zip(found, procedure, right, strict=True):
        assert (one - other).abs().max() <= 1e-12
        assert (same - other[0]).abs().max() <= 1e-12


@pytest.mark.parametrize("global_pool", [False, True])
def test_their_own_create_model_gives_an_encoder_that_is_theirs(theirs, tmp_path, monkeypatch, global_pool):
    model = theirs((16, 32, 64, 128, 256), global_pool)
    torch.save({"model": model.state_dict()}, tmp_path / "slide_encoder.pth")
    monkeypatch.setitem(ARCHITECTURES, "tiny", SlideEncoderConfig(**SIZES))
    code = sys.modules[type(model).__module__]
    own, settings = code.create_model, dict(slide_ngrids=20, global_pool=global_pool, segment_length=[16, 32, 64, 128, 256])
    with warnings.catch_warnings(), install():
        warnings.simplefilter("ignore")  # of a class token that is pooled
        ours = code.create_model(str(tmp_path / "slide_encoder.pth"), "tiny", 24, **settings).double().eval()
    assert code.create_model is own
    tiles, coords = torch.randn(1, 62, 24, dtype=torch.float64), 2 * places(62)
    for encoder in (model, ours):
        encoder.tile_size = 512
    with torch.no_grad(), in_double():
        right = [*model(tiles, coords, all_layer_embed=True), *model(tiles, coords)]
    with torch.no_grad():
        computed = [*ours(tiles, coords, all_layer_embed=True), *ours(tiles, coords)]
    assert all((one - other).abs().max() <= 1e-6 for one, other in zip(computed, right, strict=True))  # weights were in float32
    theirs_again = type(model).load_state_dict(model, ours.state_dict())
    assert not theirs_again.missing_keys
    assert not theirs_again.unexpected_keys
