"""`create_model` by the arguments of GigaPath's: what each sets, what is refused, and what packages that call it get."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.slide_encoder import ARCH, FLASH_ARCH, NARROW, tiles_and_coords

from dilkit.integrations.gigapath import SlideEncoder, create_model, install, load_slide_encoder

pytestmark = pytest.mark.usefixtures("files")


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        (dict(), dict(segment_lengths=(1024, 5792, 32768, 185363, 1048576), global_pool=False, ngrids=1000, dropout=0.25)),
        (dict(slide_ngrids=500, dropout=0.5, drop_path_rate=0.0), dict(ngrids=500, dropout=0.5, drop_path=0.0)),
        (dict(max_wsi_size=250000), dict(segment_lengths=(1024, 4870, 23170, 110217, 524288), tile_size=256)),
        (dict(tile_size=512), dict(segment_lengths=(1024, 4096, 16384, 65536, 262144), tile_size=512)),
        (dict(global_pool=None, tile_size=None, max_wsi_size=None), dict(global_pool=False, tile_size=256)),
        (dict(segment_length=[64, 128], dilated_ratio=(1, 2)), dict(segment_lengths=(64, 128), dilation_rates=(1, 2))),
        (
            dict(segment_length="[64, 128]", dilated_ratio="[1, 2]", tile_size=512),
            dict(segment_lengths=(64, 128), dilation_rates=(1, 2), tile_size=512),
        ),
    ],
)
def test_settings(settings: dict[str, Any], fields: dict[str, Any]) -> None:
    config = create_model("", ARCH, 1536, **settings).config
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        (dict(lr=0.1, embed_dim=3), TypeError, "create_model takes no lr, embed_dim; beside the architecture it takes slide_ngr"),
        (dict(slide_ngrids=0), ValueError, "slide_ngrids=0 must be at least 1"),
        (dict(drop_path_rate=1.0), ValueError, r"drop_path_rate=1\.0 must be at least 0 and less than 1"),
        (dict(dropout="much"), TypeError, "dropout='much' is a str"),
        (dict(global_pool=1), TypeError, "global_pool=1 is a int"),
        (dict(max_wsi_size=8191), ValueError, "max_wsi_size=8191 must be at least 8192"),
        (dict(tile_size=0), ValueError, "tile_size=0 must be at least 1"),
        (dict(segment_length=[64], max_wsi_size=250000), ValueError, "segment_length and max_wsi_size both say"),
        (dict(segment_length="64, many"), TypeError, "segment_length='64, many' must be numbers such as"),
        (dict(dilated_ratio=2), TypeError, "dilated_ratio=2 must be numbers"),
        (dict(dilated_ratio=[1, 0.5, 4, 8, 16]), TypeError, r"dilated_ratio\[1\]=0\.5 is a float"),
        (dict(model_arch="vit"), ValueError, "model_arch='vit' is not known; choose from 'gigapath_slide_enc12l768d'"),
        (dict(in_chans=0), ValueError, "in_chans=0 must be at least 1"),
        (dict(pretrained=None), TypeError, "pretrained=None is a NoneType; a path, 'hf_hub:NAME' or '' is needed"),
        (dict(pretrained=Path("none.pth")), FileNotFoundError, r"none\.pth' is not there; give a file, 'hf_hub:NAME', or ''"),
        (
            dict(pretrained=FLASH_ARCH),
            ValueError,
            r"model_arch='gigapath_slide_enc12l768d': .* \(32, 384\) in it and \(48, 1536\).*_enc12l384d' with in_chans=384$",
        ),
        (
            dict(pretrained=FLASH_ARCH, model_arch=FLASH_ARCH),
            ValueError,
            r"\(32, 384\) in it and \(32, 1536\).* model_arch='gigapath_slide_enc12l384d' with in_chans=3",
        ),
    ],
)
def test_refused_arguments(files: dict[str, Path], settings: dict[str, Any], error: type[Exception], text: str) -> None:
    given = dict(pretrained="", model_arch=ARCH, in_chans=1536) | settings
    with pytest.raises(error, match=text):
        create_model(**given | dict(pretrained=files.get(given["pretrained"], given["pretrained"])))


def test_what_a_checkpoint_stores_holds(files: dict[str, Path], tmp_path: Path) -> None:
    content = torch.load(files[ARCH])
    torch.save({**content, "global_pool": True, "segment_lengths": (4, 8, 16, 32, 64)}, tmp_path / "stored.pth")
    config = create_model(tmp_path / "stored.pth", ARCH, 1536, tile_size=512).config
    assert (config.global_pool, config.segment_lengths) == (True, (4, 8, 16, 32, 64))
    for given in (dict(global_pool=False), dict(max_wsi_size=250000)):
        with pytest.raises(ValueError, match=r"contradicts checkpoint .*stored\.pth"):
            create_model(tmp_path / "stored.pth", ARCH, 1536, **given)


def test_training_mode_is_warned_of_where_nothing_is_trained() -> None:
    tiles, coords = tiles_and_coords(1536)
    model = create_model("", ARCH, 1536)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"dropout changes the embeddings.*\.eval\(\)") as caught:
        model(tiles, coords)
    assert [one.filename for one in caught] == [__file__]
    model(tiles, coords)  # warnings are errors
    with torch.no_grad():
        create_model("", ARCH, 1536, dropout=0.0, drop_path_rate=0.0)(tiles, coords)
        model.eval()(tiles, coords)


def test_half_coordinates_that_are_no_pixels_are_refused() -> None:
    model = create_model("", ARCH, 1536, slide_ngrids=300).eval()
    tiles, coords = tiles_and_coords(1536)
    with pytest.warns(UserWarning, match="are lost"), pytest.raises(ValueError, match="outside the grid of 300 x 300"):
        model(tiles, (coords + 65536).half())
    with pytest.raises(TypeError, match=r"coords is torch\.bfloat16, which does not hold every pixel"):
        model(tiles, coords.bfloat16())


def test_it_is_a_slide_encoder_with_their_call_and_grid() -> None:
    model = create_model("", ARCH, 1536).eval()
    tiles, coords = tiles_and_coords(1536)
    assert isinstance(model, SlideEncoder)
    assert len(model(x=tiles, coords=coords, all_layer_embed=True)) == len(model(tiles, coords, True)) == 13
    assert model.slide_ngrids == 1000
    with pytest.raises(AttributeError):
        model.slide_ngrids = 500


UNTRAINED = "the class token is pooled, which GigaPath's pretraining did not train"
HUB = "hf_hub:prov-gigapath/prov-gigapath"


class Caller(NamedTuple):
    """How a package makes the encoder, and calls it. `name`: of the weights, those of a file where there is none."""

    settings: dict[str, Any]
    name: str = HUB
    arch: str = ARCH
    tile_size: int = 256
    dtype: torch.dtype = torch.float32
    layers: bool = False
    warnings: tuple[str, ...] = ()


CALLERS = {
    "TRIDENT": Caller(dict(global_pool=True), tile_size=512, layers=True),
    "STAMP": Caller(dict(global_pool=True), dtype=torch.float16, warnings=("coords are torch.float16",)),
    "slide2vec": Caller({}, tile_size=512),
    "LazySlide": Caller(dict(local_dir="there"), f"{HUB}-flash", FLASH_ARCH),
    "raw2features": Caller(dict(global_pool=True), "", FLASH_ARCH, tile_size=512, layers=True),
    "slideflow": Caller(dict(global_pool=False), layers=True),
}


def texts(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What `call` returns, and what it warned of, pointing here."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    assert all(one.filename == __file__ for one in caught)
    return result, [str(one.message) for one in caught]


@pytest.mark.usefixtures("not_installed")
@pytest.mark.parametrize("name", CALLERS)
def test_a_package_gets_the_embeddings_of_the_encoder_that_it_asks_for(files: dict[str, Path], name: str) -> None:
    caller, settings = CALLERS[name], CALLERS[name].settings
    pool, channels = settings.get("global_pool", False), NARROW[caller.arch].in_chans
    with install():
        create_model = importlib.import_module("gigapath.slide_encoder").create_model
        weights = caller.name or str(files[caller.arch])
        model, warned = texts(lambda: create_model(weights, caller.arch, channels, **settings))
    assert [text[: len(UNTRAINED)] for text in warned] == [UNTRAINED] * (not pool)
    assert model.training
    model.to("cpu").eval().to(caller.dtype)
    model.tile_size = np.int64(caller.tile_size)
    tiles, coords = tiles_and_coords(channels, step=caller.tile_size)
    where: Any = dict(global_pool=pool, tile_size=caller.tile_size, dtype=caller.dtype)
    with torch.inference_mode(), torch.autocast("cpu", enabled=caller.dtype == torch.float32):
        given = coords.half() if caller.dtype == torch.float16 else coords
        embeddings, warned = texts(lambda: model(tiles.to(caller.dtype), given, all_layer_embed=caller.layers))
        ours = load_slide_encoder(files[caller.arch], caller.arch, **where)
        expected = ours(tiles.to(caller.dtype), coords, all_layer_embed=caller.layers)
    assert len(embeddings) == (13 if caller.layers else 1)
    assert all(torch.equal(one, other) for one, other in zip(embeddings, expected, strict=True))
    assert [text[:24] for text in warned] == [*caller.warnings]
