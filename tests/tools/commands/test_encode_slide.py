"""`dilkit encode-slide`: the embeddings that it writes are the model's, and each slide that will not do is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import json_output, output
from helpers.slide_encoder import LENGTHS, SMALL, slide, small

from dilkit.integrations.gigapath import ARCHITECTURES, SlideEncoderConfig
from dilkit.tools.cli import main


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with weights and two slides of a small architecture, which is known while the test runs."""
    monkeypatch.setitem(ARCHITECTURES, "tiny", SlideEncoderConfig(**SMALL, segment_lengths=LENGTHS))
    torch.save({"model": small().state_dict()}, tmp_path / "weights.pth")
    (tmp_path / "slides").mkdir()
    for name, n in (("a", 30), ("b", 7)):
        write(tmp_path / "slides" / f"{name}.pt", n)
    return tmp_path


def write(path: Path, n: int) -> None:
    tiles, coords = slide(n)
    torch.save({"features": tiles[0], "coords": coords[0]}, path)


def arguments(files: Path, *more: str) -> list[str]:
    at = ["--checkpoint", str(files / "weights.pth"), "--out", str(files / "out"), "--arch", "tiny", "--dtype", "fp64"]
    return ["encode-slide", str(files / "slides"), *at, *more]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ([], {}),
        (["--tail", "exact", "--global-pool", "--backend", "reference"], dict(tail="exact", global_pool=True)),
        (["--all-layers"], {}),
    ],
)
def test_the_embeddings_are_those_of_the_model(
    files: Path, capsys: pytest.CaptureFixture[str], options: list[str], settings: dict[str, Any]
) -> None:
    report = json_output(capsys, *arguments(files, *options))
    assert [Path(one["out"]).name for one in report["slides"]] == ["a.pt", "b.pt"]
    assert [one["tiles"] for one in report["slides"]] == [30, 7]
    assert report["refused"] == []
    model, whole = small(**settings), "--all-layers" in options
    for name, n in (("a", 30), ("b", 7)):
        found = torch.load(files / "out" / f"{name}.pt", weights_only=True)
        with torch.no_grad():
            right = torch.cat(model(*slide(n), all_layer_embed=whole)).float()
        assert torch.allclose(found["layers"] if whole else found["embedding"][None], right, atol=1e-6)


def test_a_slide_that_will_not_do_is_named_and_the_others_are_embedded(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"features": torch.zeros(0, 10), "coords": torch.zeros(0, 2)}, files / "slides" / "empty.pt")
    torch.save({"features": torch.zeros(1, 10), "coords": torch.tensor([[0, 300000]])}, files / "slides" / "far.pt")
    torch.save({"features": torch.zeros(1, 11), "coords": torch.zeros(1, 2)}, files / "slides" / "wide.pt")
    assert main(arguments(files)) == 2
    printed = capsys.readouterr()
    assert "wrote 2 embeddings" in printed.out
    assert [path.name for path in sorted((files / "out").iterdir())] == ["a.pt", "b.pt"]
    empty, far, wide = printed.err.splitlines()
    assert "empty.pt: the slide has no tiles" in empty
    assert "far.pt: coords: tile 0 of 1 is at (0, 300000)" in far
    assert "wide.pt: tiles has shape (1, 1, 11)" in wide


def test_a_checkpoint_that_does_not_fit_ends_it(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": {"norm.weight": torch.zeros(7)}}, files / "weights.pth")
    assert main(arguments(files)) == 2
    assert "1 of another shape: norm.weight (7,) instead of (48,)" in capsys.readouterr().err
    assert not any((files / "out").iterdir())


def test_nothing_half_written_is_left(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(content: object, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", interrupted)
        assert main(arguments(files)) == 130
    assert not any((files / "out").iterdir())


def test_embeddings_that_would_replace_one_another_or_their_features(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(files, "--out", str(files / "slides"))) == 2
    assert "a.pt would be replaced by its own embedding" in capsys.readouterr().err
    assert set(torch.load(files / "slides" / "a.pt", weights_only=True)) == {"features", "coords"}
    write(files / "a.pt", 3)
    command = arguments(files)
    assert main([command[0], str(files / "a.pt"), *command[1:]]) == 2
    assert "several files would be written as a.pt" in capsys.readouterr().err


def test_the_help_names_the_architectures(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(arch in output(capsys, "encode-slide", "--help") for arch in ARCHITECTURES)
