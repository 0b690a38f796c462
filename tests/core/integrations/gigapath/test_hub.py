"""Checkpoints by name: what is asked of huggingface_hub, and what to do without it. Nothing is downloaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.slide_encoder import LENGTHS, SMALL, slide, small

from dilkit.integrations.gigapath import ARCHITECTURES, SlideEncoderConfig, load_slide_encoder
from dilkit.integrations.gigapath.hub import local_file

NAME = "hf_hub:prov-gigapath/prov-gigapath"


def hub(monkeypatch: pytest.MonkeyPatch, download: Callable[..., str]) -> None:
    """Put a module with this function in the place of huggingface_hub."""
    module = ModuleType("huggingface_hub")
    module.hf_hub_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_the_published_file_is_downloaded_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "tiny", SlideEncoderConfig(**SMALL, segment_lengths=LENGTHS))
    asked = []

    def download(repository: str, filename: str, local_dir: str) -> str:
        asked.append((repository, filename, Path(local_dir)))
        torch.save({"model": small().state_dict()}, tmp_path / filename)
        return str(tmp_path / filename)

    hub(monkeypatch, download)
    model = load_slide_encoder(NAME, "tiny", ngrids=20, global_pool=False, dtype=torch.float64)
    assert asked == [("prov-gigapath/prov-gigapath", "slide_encoder.pth", Path.home() / ".cache")]
    with torch.no_grad():
        assert torch.equal(model(*slide(20))[0], small()(*slide(20))[0])


def test_paths_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "weights.pth").touch()
    assert local_file(tmp_path / "weights.pth", tmp_path) == tmp_path / "weights.pth"
    assert local_file(str(tmp_path / "weights.pth")) == tmp_path / "weights.pth"


def test_a_path_without_a_file_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"^checkpoint '.*none\.pth' does not exist; give the file .* 'hf_hub:prov-gigapath/"
    ):
        load_slide_encoder(tmp_path / "none.pth")
    with pytest.raises(FileNotFoundError, match=r"^checkpoint '' does not exist"):  # and is not the current folder
        load_slide_encoder("")


def test_without_huggingface_hub_the_file_may_lie_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ImportError, match=r"pip install huggingface_hub, or download slide_encoder\.pth from https://hugg"
    ) as error:
        local_file(NAME, tmp_path)
    assert f"huggingface.co/prov-gigapath/prov-gigapath and put it at {tmp_path / 'slide_encoder.pth'}" in str(error.value)
    (tmp_path / "slide_encoder.pth").touch()
    assert local_file(NAME, tmp_path) == tmp_path / "slide_encoder.pth"


def test_a_failed_download_says_what_else_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: str, **__: str) -> str:
        raise ConnectionError("401: the repository is gated\nlog in")

    hub(monkeypatch, download)
    with pytest.raises(
        OSError,
        match=r"gigapath cannot be downloaded: 401: the repository is gated; accept the terms at .*, or download .*its path",
    ):
        local_file(NAME, tmp_path)
