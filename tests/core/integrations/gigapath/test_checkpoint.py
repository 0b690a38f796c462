"""Checkpoints: published names and shapes, what else lies in the file, files that do not fit, names of a hub, and having none."""

import argparse
import os
import pickle
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.project import ROOT, succeed
from helpers.slide_encoder import LENGTHS, SMALL, manifest, slide, small

from dilkit.integrations.gigapath import ARCHITECTURES, SlideEncoder, SlideEncoderConfig, load_slide_encoder
from dilkit.integrations.gigapath.checkpoint import local_file

NAME = "hf_hub:prov-gigapath/prov-gigapath"


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "tiny", SlideEncoderConfig(**SMALL, segment_lengths=LENGTHS))
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
    assert load_slide_encoder(tmp_path / "weights.pth", tiny, global_pool=True).global_pool  # warnings are errors
    assert not load_slide_encoder(arch=tiny).global_pool


def test_every_difference_is_listed(tiny, tmp_path):
    """Weights of integers are quantised ones, whose scales lie elsewhere."""
    weights = small().state_dict()
    del weights["norm.bias"], weights["cls_token"]
    weights |= {"decoder.weight": torch.zeros(2), "pos_embed": torch.zeros(3), "norm.weight": torch.zeros(7)}
    weights["encoder.layer_norm.bias"] = torch.zeros(48, dtype=torch.int8)
    torch.save({"model": weights}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"weights\.pth does not fit arch='tiny'") as caught:
        load_slide_encoder(tmp_path / "weights.pth", tiny)
    assert "2 missing: cls_token, norm.bias; 2 not known: decoder.weight, pos_embed; " in str(caught.value)
    assert "1 of another shape: norm.weight (7,) instead of (48,)" in str(caught.value)
    assert "1 not of floating point: encoder.layer_norm.bias" in str(caught.value)


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
        ({"model": {"norm.weight": torch.zeros(48)}}, "46 missing: cls_token.{,400}, [.]{3}$"),
        (
            {"model": {name: torch.zeros(()).expand(shape) for name, shape in manifest(384, 12, 384).items()}},
            r"weights\.pth does not fit arch='tiny': patch_embed\.proj\.weight is \(384, 384\) in it and \(48, 10\) in .*, "
            r"\(embed_dim, in_chans\); it fits arch='gigapath_slide_enc12l384d' with in_chans=384",
        ),
        ([1, 2], "holds no weights"),
        ({"model": 3}, "holds no weights"),
        ({"model": {"norm.weight": 1.0}}, "holds no weights"),
        ({"model": {"norm.weight": torch.eye(48).to_sparse()}}, "holds no weights"),
        ({"model": {}, "depth": -1}, "stores settings that no encoder has: depth=-1"),
    ],
)
def test_content_that_does_not_fit_is_refused(tiny, tmp_path, content, message):
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=message):
        load_slide_encoder(tmp_path / "weights.pth", tiny)


def test_a_missing_file_a_folder_and_an_unknown_architecture(tiny, tmp_path):
    missing = r"^checkpoint '.*none\.pth' does not exist; give the file .* 'hf_hub:prov-gigapath/"
    with pytest.raises(FileNotFoundError, match=missing):
        load_slide_encoder(tmp_path / "none.pth", tiny)
    with pytest.raises(FileNotFoundError, match=r"^checkpoint '' does not exist"):  # and is not the current folder
        load_slide_encoder("")
    with pytest.raises(IsADirectoryError):
        load_slide_encoder(tmp_path, tiny)
    with pytest.raises(ValueError, match="arch='vit' is not known; choose from 'gigapath_slide_enc12l768d'"):
        load_slide_encoder(arch="vit")


@pytest.fixture
def hub(monkeypatch):
    module = ModuleType("huggingface_hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return module


def test_the_published_file_is_downloaded(tiny, tmp_path, hub):
    asked = []

    def download(repository, filename, local_dir):
        asked.append((repository, filename, Path(local_dir)))
        torch.save({"model": small().state_dict()}, tmp_path / filename)
        return str(tmp_path / filename)

    def gated(*_, **__):
        raise ConnectionError("401: the repository is gated\nlog in")

    hub.hf_hub_download = download
    model = load_slide_encoder(NAME, tiny, ngrids=20, global_pool=False, dtype=torch.float64)
    assert asked == [("prov-gigapath/prov-gigapath", "slide_encoder.pth", Path.home() / ".cache")]
    assert torch.equal(model(*slide(20))[0], small()(*slide(20))[0])
    hub.hf_hub_download = gated
    said = r"gigapath cannot be downloaded: 401: the repository is gated; accept the terms at .*, or download .*its path"
    with pytest.raises(OSError, match=said):
        local_file(NAME, tmp_path)


def test_without_huggingface_hub_the_file_may_lie_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    way_out = r"pip install huggingface_hub, or download slide_encoder\.pth from https://hugg"
    with pytest.raises(ImportError, match=way_out) as error:
        local_file(NAME, tmp_path)
    assert f"huggingface.co/prov-gigapath/prov-gigapath and put it at {tmp_path / 'slide_encoder.pth'}" in str(error.value)
    (tmp_path / "slide_encoder.pth").touch()
    assert local_file(NAME, tmp_path) == tmp_path / "slide_encoder.pth"


PAGE = (ROOT / "docs" / "gigapath.md").read_text()


@pytest.mark.slow
def test_a_slide_is_embedded_without_the_weights(tmp_path):
    name, program, commands = re.findall(
        r'^```python title="([^"]+)"\n(.*?)^```\n\n```console\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL
    )[0]
    (tmp_path / name).write_text(program)
    for line in commands.splitlines():
        first, *arguments = shlex.split(line.removeprefix("$ "))
        command = [sys.executable] if first == "python" else [sys.executable, "-m", first]
        shown = succeed(*command, *arguments, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert "torch.Size([768])" in shown
    (tmp_path / "random.pth").unlink()
