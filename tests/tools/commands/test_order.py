"""`dilkit order`: the table side by side, the sentence on it, the picture, JSON, and bad arguments."""

from __future__ import annotations

import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import json_output, output

from dilkit import LocalityReport, locality_report, order
from dilkit.orders import locality
from dilkit.tools.cli import main
from dilkit.tools.commands.order.command import CURVES, segment_tile, sides
from dilkit.tools.commands.order.report import label, reading
from dilkit.tools.results.decode import encode
from dilkit.tools.site import order_figures

SMALL = ("order", "--shape", "16x16", "--segments", "64")


def figures(shape: tuple[int, ...], length: int, rates: tuple[int, ...] = (2, 8), **options: Any) -> dict[str, LocalityReport]:
    tiles = {curve: segment_tile(shape, length) if curve == "tile" else None for curve in CURVES}
    return {c: locality_report(order(shape, c, tile=tile), length, rates, **options) for c, tile in tiles.items()}


def test_curves_are_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, *SMALL, "--rates", "2,4").splitlines()
    assert lines[0] == "16x16 cells: 256 tokens; > marks hilbert"
    assert lines[2] == "segments of 64 tokens: 4"
    found = figures((16, 16), 64, (2, 4))
    for table, cells in (
        (lines[4:9], [f"{found[c].aligned.near_48:.3f}" for c in CURVES]),
        (lines[12:17], [f"{found[c].kept[1].mean:.2f} ({found[c].kept[1].max:.1f})" for c in CURVES]),
    ):
        marks, names = zip(*((line[2], line[4:15].strip()) for line in table), strict=True)
        assert names == ("row-major", "snake", "tile 8x8", "morton", "hilbert")
        assert marks == (" ", " ", " ", " ", ">")
        assert all(cell in line for cell, line in zip(cells, table, strict=True))


def test_json_holds_the_reports(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--segments", "64,50", "--rates", "2,8", "--curve", "morton", "--window", "5x3", "--block", "16")
    found = json_output(capsys, "order", "--shape", "16x16", *options)
    assert (found["shape"], found["tokens"], found["curve"], found["png"]) == ([16, 16], 256, "morton", None)
    assert [segment["segment_length"] for segment in found["segments"]] == [64, 50]
    expected = locality_report(order((16, 16), "hilbert"), 50, (2, 8), window=(5, 3), block=16)
    assert found["segments"][1]["curves"]["hilbert"] == encode(expected)
    assert list(found["segments"][0]["curves"]) == ["row-major", "snake", "tile", "block-tile", "morton", "hilbert"]
    assert found["segments"][0]["curves"]["block-tile"]["tile"] == [4, 4]


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--shape 1000x1 --segments 7 --rates 1,2,3,4,5,6,7,8,9",
        "--shape 300",
        "--shape 8x16x16 --segments 512 --window 3 --extra-tokens 1 --curve tile",
        "--shape 12x20 --tile 3x5 --curve snake --window 3x5 --segments 60,100000 --rates 100",
    ],
)
def test_the_report_fits_in_100_columns(capsys: pytest.CaptureFixture[str], options: str) -> None:
    lines = output(capsys, "order", *options.split()).splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("  > ") for line in lines) >= 2


@pytest.mark.parametrize(
    ("shape", "length", "rates", "chosen", "verdict"),
    [
        ((16, 16), 64, (1,), "morton", "Plain tiles are enough here, morton brings nothing more"),
        ((64, 64), 256, (1,), "hilbert", "Plain tiles are enough as long as segments stay aligned: "),
        ((64, 64), 256, (16,), "hilbert", "Plain tiles are enough as long as segments stay aligned and undilated: "),
        ((64, 64), 256, (16,), "tile", "Plain tiles are enough as long as segments stay aligned and undilated: "),
        ((64, 64), 100, (16,), "hilbert", "Hilbert is the better choice here: "),
        ((64, 64), 256, (1,), "row-major", "Plain tiles are the better choice here, beside row-major: "),
        ((500,), 100, (4,), "hilbert", "In one dimension the sequence's own order is the best there is"),
    ],
)
def test_the_reading_goes_by_the_figures(shape: Any, length: int, rates: Any, chosen: str, verdict: str) -> None:
    found = figures(shape, length, rates)
    sentence = reading(found, chosen)
    assert sentence.startswith(verdict)
    if len(shape) > 1:
        assert f"tiles of {'x'.join(map(str, found['tile'].tile or ()))} are " in sentence
        assert f"{found['tile'].shifted.near_48:.3f}" in sentence
        assert sentence.endswith(".")
        assert ". " not in sentence


def test_the_reading_names_the_blocks_of_a_window() -> None:
    found = figures((16, 16), 64, window=(5, 5), block=16)
    blocks = [f"{found[curve].active_blocks:.2f} for {label(found[curve])}" for curve in ("tile", "hilbert", "row-major")]
    assert f"blocks for the window: {', '.join(blocks)}" in reading(found, "hilbert")


def test_what_is_sampled_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locality, "WORK", 1)
    text = output(capsys, *SMALL, "--window", "3", "--block", "16")
    assert "hilbert: distances come from 1 segments drawn at random" in text
    assert "row-major: blocks come from 1 blocks of queries drawn at random" in text
    monkeypatch.undo()
    assert "drawn at random" not in output(capsys, *SMALL, "--window", "3", "--block", "16")


@pytest.mark.parametrize(
    ("shape", "length", "tile"),
    [
        ((64, 64), 256, (16, 16)),
        ((256, 256), 1500, (30, 50)),
        ((32, 64, 64), 4096, (16, 16, 16)),
        ((64, 64), 100, (10, 10)),  # 4 x 25 would fill the rows, but is too long for it
        ((48, 96), 96, (8, 12)),
        ((100,), 30, (30,)),
        ((5, 7), 1000, (5, 7)),
        ((10, 10), 11, (3, 3)),  # no tile of 11 fits
    ],
)
def test_tiles_hold_a_segment(shape: tuple[int, ...], length: int, tile: tuple[int, ...]) -> None:
    assert segment_tile(shape, length) == tile
    assert prod(tile) <= prod(shape)


@pytest.mark.parametrize(
    "options", ["--shape 16x16 --segments 64", "--shape 5x140 --segments 60", "--shape 4x6x8 --segments 32", "--shape 50"]
)
def test_a_picture_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path, options: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "order.png"
    text = output(capsys, "order", *options.split(), "--rates", "2,4", "--png", str(path))
    assert text.endswith(f"wrote {path}\n")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_one_order_and_an_extra_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "order.svg"
    found = json_output(capsys, *SMALL, "--curve", "row-major", "--extra-tokens", "1", "--png", str(path))
    assert found["png"] == str(path)
    assert b"<svg" in path.read_bytes()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*SMALL, "--png", str(path)]) == 2
    assert "pip install 'dilkit[plot]'" in capsys.readouterr().err
    assert "hilbert" in output(capsys, *SMALL)


def test_sides_as_people_write_them() -> None:
    assert (sides("64x48"), sides("1KX2"), sides("7"), sides("2x3x4")) == ((64, 48), (1024, 2), (7,), (2, 3, 4))


def test_the_figures_of_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_figures, "CASES", (((16, 16), 64), ((4, 4, 8), 32)))
    head, rule, *rows = order_figures.locality_table(Path()).splitlines()
    assert head.startswith("| grid, segment | curve | near 48 |")
    assert set(rule) <= set("| -")
    assert len(rows) == 2 * 6
    assert rows[0].startswith("| 16 x 16, 64 | row-major |")
    assert rows[6].startswith("| 4 x 4 x 8, 32 | row-major |")
