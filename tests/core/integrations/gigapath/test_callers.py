"""Packages that embed slides with GigaPath: what each makes, sets and calls, in its order, after `install()`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gigapath_package import (
    ARCH,
    FLASH_ARCH,
    FLASH_HUB,
    HUB,
    checkpoints,
    tiles_and_coords,
    with_warnings,
    without,
)
from torch import Tensor

from dilkit.integrations.gigapath import SlideEncoder, install, load_slide_encoder

UNTRAINED = "the class token is pooled, which GigaPath's pretraining did not train"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    """Checkpoints by architecture, where neither GigaPath's package nor flash-attn is installed."""
    with without("gigapath", "flash_attn", "torchscale"):
        yield checkpoints(tmp_path, monkeypatch)


def slide_encoder() -> Any:
    return importlib.import_module("gigapath.slide_encoder")


def ours(file: Path, arch: str = ARCH, **settings: Any) -> SlideEncoder:
    return load_slide_encoder(file, arch, **dict(global_pool=True) | settings)


@pytest.mark.parametrize("weights", ["hub", "file"])
def test_trident(files: dict[str, Path], weights: str) -> None:
    """It asserts a version of flash-attn, sets the tile size at each call, and takes the embedding of the eleventh layer."""
    with install(flash_attn="2.5.8"):
        assert importlib.import_module("flash_attn").__version__ == "2.5.8"
        model = slide_encoder().create_model(HUB if weights == "hub" else str(files[ARCH]), ARCH, 1536, global_pool=True)
    for weight in model.parameters():
        weight.requires_grad = False
    model.eval()
    tiles, coords = tiles_and_coords(1536, step=512)
    with torch.autocast(device_type="cpu", enabled=True):
        model.tile_size = np.int64(512)
        embedding = model(tiles, coords, all_layer_embed=True)[11]
        expected = ours(files[ARCH], tile_size=512)(tiles, coords, all_layer_embed=True)
    assert torch.equal(embedding, expected[11])
    assert len(expected) == 13


def test_trident_without_weights() -> None:
    with install():
        model = slide_encoder().create_model("", ARCH, 1536, global_pool=True)
    assert len(model(*tiles_and_coords(1536), all_layer_embed=True)) == 13


@pytest.mark.parametrize("pixels", [224, 256])
def test_stamp(files: dict[str, Path], pixels: int) -> None:
    """Everything is in half precision, the coordinates too; they were micrometres."""
    with install():
        model = slide_encoder().create_model(HUB, ARCH, 1536, global_pool=True)
    model.to("cpu").eval()
    model.half()
    tiles, micrometres = tiles_and_coords(1536, step=256, dtype=torch.float64)
    coords = torch.tensor(micrometres[0].numpy() / (256 / pixels), dtype=torch.float32).unsqueeze(0).half()
    model.to(torch.float16)
    with torch.inference_mode():
        embeddings, warned = with_warnings(lambda: model(tiles[0].unsqueeze(0).half(), coords))
        expected, others = with_warnings(lambda: ours(files[ARCH], dtype=torch.float16)(tiles.half(), coords.float()))
    assert torch.equal(torch.cat(embeddings, dim=0), expected[0])
    texts = [str(one.message) for one in warned]
    assert texts[0].startswith("coords are torch.float16")
    assert texts[1:] == [str(one.message) for one in others]
    assert all(one.filename == __file__ for one in warned)


def test_slide2vec(files: dict[str, Path]) -> None:
    """It says nothing of pooling, and leaves the model in the mode in which it was made: training."""
    with install():
        create_model = slide_encoder().create_model
        model, warned = with_warnings(lambda: create_model(HUB, ARCH, 1536))
    assert [str(one.message)[: len(UNTRAINED)] for one in warned] == [UNTRAINED]
    assert warned[0].filename == __file__
    tiles, coords = tiles_and_coords(1536, step=512)
    coords = torch.floor(coords.to(torch.float32) * 0.25 / 0.5).to(torch.long)

    def embedded(encoder: SlideEncoder) -> Tensor:
        torch.manual_seed(7)
        with torch.inference_mode():
            return encoder(tiles, coords)[-1].squeeze(0)

    embedding, warned = with_warnings(lambda: embedded(model))
    assert ["training mode" in str(one.message) for one in warned] == [True]
    assert torch.equal(embedding, embedded(ours(files[ARCH], global_pool=False).train()))
    assert torch.equal(embedded(model.eval()), embedded(ours(files[ARCH], global_pool=False)))


@pytest.mark.parametrize(("hub", "arch", "channels"), [(HUB, ARCH, 1536), (FLASH_HUB, FLASH_ARCH, 384)])
def test_lazyslide(files: dict[str, Path], tmp_path: Path, hub: str, arch: str, channels: int) -> None:
    """Both encoders, each in a folder of its own; it used to put a method of its own into their class."""
    with install():
        module = slide_encoder()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.LongNetViT, "get_optimal_segment_length", lambda self: "[1024]", raising=False)
            model, warned = with_warnings(lambda: module.create_model(hub, arch, channels, local_dir=str(tmp_path / arch)))
    assert [str(one.message)[: len(UNTRAINED)] for one in warned] == [UNTRAINED]
    tiles, coords = tiles_and_coords(channels)
    with torch.no_grad():
        embedding = model.eval()(tiles, coords)[0].squeeze()
        assert torch.equal(embedding, ours(files[arch], arch, global_pool=False)(tiles, coords)[0].squeeze())


@pytest.mark.parametrize(("arch", "channels"), [(ARCH, 1536), (FLASH_ARCH, 384)])
def test_raw2features(files: dict[str, Path], arch: str, channels: int) -> None:
    """It puts GigaPath's copy of torchscale where torchscale is imported from, and asks the model how large its grid is."""
    with install():
        sys.modules["torchscale"] = importlib.import_module("gigapath.torchscale")
        create_model = slide_encoder().create_model
        model = create_model(str(files[arch]), arch, channels, global_pool=True)
    assert "torchscale" not in sys.modules
    model.eval().to("cpu")
    assert int(model.slide_ngrids) == 1000
    model.tile_size = 512
    tiles, coords = tiles_and_coords(channels, step=512, dtype=torch.float32)
    with torch.autocast("cpu", enabled=False), torch.inference_mode():
        embedding = model(tiles, coords, all_layer_embed=True)[-1].reshape(-1)
        expected = ours(files[arch], arch, tile_size=512)(tiles, coords, all_layer_embed=True)
    assert torch.equal(embedding, expected[12].reshape(-1))


def test_slideflow(files: dict[str, Path]) -> None:
    """It looks for flash-attn in GigaPath's copy of torchscale, and names the embeddings of all layers."""
    with install(flash_attn="2.5.8"):
        assert importlib.import_module("gigapath.torchscale.component.flash_attention").flash_attn_func is not None
        create_model = slide_encoder().create_model
        model, warned = with_warnings(lambda: create_model(HUB, ARCH, 1536, global_pool=False).to(torch.device("cpu")))
    assert [str(one.message)[: len(UNTRAINED)] for one in warned] == [UNTRAINED]
    model.eval()
    tiles, coords = tiles_and_coords(1536)
    with torch.autocast("cpu", torch.float16), torch.inference_mode():
        embeddings = model(tiles, coords, all_layer_embed=True)
        alone = model(tiles, coords, all_layer_embed=False)
        reference = ours(files[ARCH], global_pool=False)
        expected = reference(tiles, coords, all_layer_embed=True)
        assert torch.equal(alone[0], reference(tiles, coords)[0])
    assert all(torch.equal(one, other) for one, other in zip(embeddings, expected, strict=True))
