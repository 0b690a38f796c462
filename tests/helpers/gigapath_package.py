"""What packages that call GigaPath's find: a hub that gives out narrow checkpoints, and GigaPath's package, installed or not."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from dilkit.integrations.gigapath import ARCHITECTURES, SlideEncoder, SlideEncoderConfig

HUB = "hf_hub:prov-gigapath/prov-gigapath"
FLASH_HUB = f"{HUB}-flash"
ARCH, FLASH_ARCH = "gigapath_slide_enc12l768d", "gigapath_slide_enc12l384d"
NARROW = {
    ARCH: SlideEncoderConfig(embed_dim=48, num_heads=4, in_chans=1536),
    FLASH_ARCH: SlideEncoderConfig(embed_dim=32, num_heads=4, in_chans=384),
}
"""The architectures as tests have them: of 12 layers and as many channels as published, but narrow."""
OWN = """
def create_model(pretrained, model_arch, in_chans, local_dir="there", **kwargs):
    "GigaPath's own."
    return ["theirs", pretrained, model_arch, in_chans, local_dir, kwargs]
"""
Result = TypeVar("Result")


def checkpoints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Files of random weights, by architecture, which a module in the place of huggingface_hub gives out by repository."""
    files = {}
    for seed, (arch, config) in enumerate(NARROW.items()):
        torch.manual_seed(seed)
        model = SlideEncoder(config)
        for weight in model.parameters():
            weight.data += 0.3 * torch.randn_like(weight)
        files[arch] = folder / arch / "slide_encoder.pth"
        files[arch].parent.mkdir()
        torch.save({"model": model.state_dict()}, files[arch])
        monkeypatch.setitem(ARCHITECTURES, arch, config)
    module = ModuleType("huggingface_hub")
    module.hf_hub_download = lambda name, filename, local_dir: str(files[FLASH_ARCH if name.endswith("-flash") else ARCH])
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return files


@contextmanager
def without(*packages: str) -> Iterator[None]:
    """As if these packages were not installed."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
            patch.delitem(sys.modules, name)
        for name in packages:
            patch.setitem(sys.modules, name, None)
        yield


def write_package(folder: Path) -> None:
    """A package `gigapath` in `folder`: its slide encoder, what looks for flash-attn, and a module beside them."""
    component = folder / "gigapath" / "torchscale" / "component"
    component.mkdir(parents=True)
    for package in (component, component.parent, component.parent.parent):
        (package / "__init__.py").touch()
    (folder / "gigapath" / "slide_encoder.py").write_text(OWN)
    (folder / "gigapath" / "pipeline.py").write_text("from .slide_encoder import create_model\n")
    (component / "flash_attention.py").write_text("flash_attn_func = None\n")


def tiles_and_coords(channels: int, step: int = 256, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Tiles `(1, 40, channels)` of a slide, and their pixels, `step` apart."""
    generator = torch.Generator().manual_seed(0)
    places = step * torch.cartesian_prod(torch.arange(8), torch.arange(5))
    return torch.randn(1, 40, channels, generator=generator), places[None].to(dtype)


def with_warnings(call: Callable[[], Result]) -> tuple[Result, list[warnings.WarningMessage]]:
    """What `call` returns, and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return call(), caught
