"""Checkpoints: published names and shapes, what else lies in the file, and files that do not fit."""

from __future__ import annotations

import argparse
import os
import pickle

import pytest
import torch
from helpers.slide_encoder import LENGTHS, SMALL, manifest, slide, small

from dilkit.integrations.gigapath import ARCHITECTURES, SlideEncoder, SlideEncoderConfig, load_slide_encoder


@pytest.fixture
def tiny(monkeypatch):
    """The name of a small architecture, which is known while the test runs."""
    config = SlideEncoderConfig(**SMALL, segment_lengths=LENGTHS)
    monkeypatch.setitem(ARCHITECTURES, "tiny", config)
    return "tiny"


@pytest.mark.parametrize(
    ("arch", "sizes", "numbers"),
    [
        ("gigapath_slide_enc12l768d", (768, 12, 1536), 86330880),
        ("gigapath_slide_enc24l1024d", (1024, 24, 1536), 304134144),
        ("gigapath_slide_enc12l1536d", (1536, 12, 1536), 342531072),
        ("gigapath_slide_enc12l384d", (384, 12, 384), 21489408),
    ],
)
def test_names_and_shapes_are_the_published_ones(arch, sizes, numbers):
    model = SlideEncoder(ARCHITECTURES[arch], device="meta")
    assert {name: tuple(weight.shape) for name, weight in model.state_dict().items()} == manifest(*sizes)
    assert sum(weight.numel() for weight in model.parameters()) == numbers


@pytest.mark.parametrize("beside", [None, dict(epoch=3, args=argparse.Namespace(lr=0.1))])
def test_weights_are_read(tiny, tmp_path, beside):
    model = small()
    torch.save(model.state_dict() if beside is None else dict(model=model.state_dict(), **beside), tmp_path / "weights.pth")
    loaded = load_slide_encoder(tmp_path / "weights.pth", tiny, ngrids=20, global_pool=False, dtype=torch.float64)
    assert not loaded.training
    assert loaded.config == model.config
    with torch.no_grad():
        assert torch.equal(loaded(*slide(30))[0], model(*slide(30))[0])


def test_settings_are_those_asked_for(tiny):
    settings = dict(ngrids=30, tile_size=512, segment_lengths=(4, 8, 12), tail="exact", global_pool=True)
    model = load_slide_encoder(arch=tiny, **settings, activation_checkpointing=True, backend="reference", dtype=torch.bfloat16)
    assert all(getattr(model.config, name) == value for name, value in settings.items())
    assert model.activation_checkpointing
    assert model.attention.backend == "reference"
    assert {weight.dtype for weight in (*model.parameters(), *model.buffers())} == {torch.bfloat16}


def test_pooling_of_published_weights_is_to_be_said(tiny, tmp_path):
    torch.save({"model": small().state_dict()}, tmp_path / "weights.pth")
    with pytest.warns(UserWarning, match="GigaPath's pretraining did not train; global_pool=True"):
        assert not load_slide_encoder(tmp_path / "weights.pth", tiny).global_pool
    for said in (False, True):  # warnings are errors
        assert load_slide_encoder(tmp_path / "weights.pth", tiny, global_pool=said).global_pool is said
    assert not load_slide_encoder(arch=tiny).global_pool


def test_weights_of_integers_are_refused(tiny, tmp_path):
    """Such as quantised ones, whose scales lie elsewhere."""
    weights = small().state_dict()
    weights["norm.weight"] = weights["norm.weight"].to(torch.int8)
    torch.save({"model": weights}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"1 not of floating point: norm\.weight"):
        load_slide_encoder(tmp_path / "weights.pth", tiny, global_pool=True)


def test_no_error_lists_hundreds_of_names(tiny, tmp_path):
    torch.save({"model": {"norm.weight": torch.zeros(48)}}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match="46 missing: cls_token") as caught:
        load_slide_encoder(tmp_path / "weights.pth", tiny)
    assert len(str(caught.value)) < 500
    assert str(caught.value).endswith(", ...")


def test_every_difference_is_listed(tiny, tmp_path):
    weights = small().state_dict()
    del weights["norm.bias"], weights["cls_token"]
    weights |= {"decoder.weight": torch.zeros(2), "pos_embed": torch.zeros(3), "norm.weight": torch.zeros(7)}
    torch.save({"model": weights}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"weights\.pth does not fit arch='tiny'") as caught:
        load_slide_encoder(tmp_path / "weights.pth", tiny)
    for part in (
        "2 missing: cls_token, norm.bias",
        "2 not known: decoder.weight, pos_embed",
        "1 of another shape: norm.weight (7,) instead of (48,)",
    ):
        assert part in str(caught.value)


def test_the_architecture_that_fits_is_named(tiny, tmp_path):
    weights = {name: torch.zeros(()).expand(shape) for name, shape in manifest(384, 12, 384).items()}
    torch.save({"model": weights}, tmp_path / "weights.pth")
    fits = (
        r"weights\.pth does not fit arch='tiny': patch_embed\.proj\.weight is \(384, 384\) in it and \(48, 10\) in the model, "
        r"\(embed_dim, in_chans\); it fits arch='gigapath_slide_enc12l384d' with in_chans=384"
    )
    with pytest.raises(ValueError, match=fits):
        load_slide_encoder(tmp_path / "weights.pth", tiny)


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b"nonsense", "it begins as other files do"),
        (b"PK\x03\x04 nonsense", "it is damaged, or cut off"),
        (pickle.dumps({"model": {}, "x": Harmful()}), "to load these could run code"),
    ],
    ids=["empty", "text", "cut off", "code"],
)
def test_other_files_are_refused(tiny, tmp_path, monkeypatch, content, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.pth").write_bytes(content)
    with pytest.raises(ValueError, match=rf"weights\.pth is no file of tensors, as torch\.save writes them: .*{why}"):
        load_slide_encoder(tmp_path / "weights.pth", tiny)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds no weights"),
        ({"model": 3}, "holds no weights"),
        ({"model": {"norm.weight": 1.0}}, "holds no weights"),
        ({"model": {"norm.weight": torch.eye(48).to_sparse()}}, "holds no weights"),
        ({"model": {}, "depth": -1}, "stores settings that no encoder has: depth=-1"),
    ],
)
def test_files_without_weights_are_refused(tiny, tmp_path, content, message):
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=message):
        load_slide_encoder(tmp_path / "weights.pth", tiny)


def test_a_missing_file_a_folder_and_an_unknown_architecture(tiny, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.pth"):
        load_slide_encoder(tmp_path / "none.pth", tiny)
    with pytest.raises(IsADirectoryError):
        load_slide_encoder(tmp_path, tiny)
    with pytest.raises(ValueError, match="arch='vit' is not known; choose from 'gigapath_slide_enc12l768d'"):
        load_slide_encoder(arch="vit")
