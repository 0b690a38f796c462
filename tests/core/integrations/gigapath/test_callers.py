"""Packages that embed slides with GigaPath: what each makes, sets and calls, after `install()`."""

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

from dilkit.integrations.gigapath import install, load_slide_encoder

UNTRAINED = "the class token is pooled, which GigaPath's pretraining did not train"
HUB = "hf_hub:prov-gigapath/prov-gigapath"
pytestmark = pytest.mark.usefixtures("not_installed")


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
