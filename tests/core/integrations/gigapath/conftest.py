"""What packages that call GigaPath's find: a hub that gives out narrow checkpoints, and GigaPath's package, installed or not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.slide_encoder import NARROW

from dilkit.integrations.gigapath import ARCHITECTURES, SlideEncoder

PACKAGES = ("gigapath", "flash_attn", "torchscale")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Files of random weights, by architecture, which a module in the place of huggingface_hub gives out by repository."""
    files = {}
    for seed, (arch, config) in enumerate(NARROW.items()):
        torch.manual_seed(seed)
        model = SlideEncoder(config)
        for weight in model.parameters():
            weight.data += 0.3 * torch.randn_like(weight)
        files[arch] = tmp_path / arch / "slide_encoder.pth"
        files[arch].parent.mkdir()
        torch.save({"model": model.state_dict()}, files[arch])
        monkeypatch.setitem(ARCHITECTURES, arch, config)
    module, (usual, flash) = ModuleType("huggingface_hub"), files.values()
    module.hf_hub_download = lambda name, filename, local_dir: str(flash if name.endswith("-flash") else usual)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return files


@pytest.fixture
def not_installed() -> Iterator[None]:
    """Neither package is installed, and what a test imports or installs is gone after it."""
    finders = [*sys.meta_path]
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            patch.delitem(sys.modules, name)
        for name in PACKAGES:
            patch.setitem(sys.modules, name, None)
        yield
        assert sys.meta_path == finders
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            del sys.modules[name]
