"""`dilkit draw`."""

import sys

import pytest
from helpers.command_line import json_output, output

from dilkit.tools.cli import main


def test_draw_in_characters(capsys, monkeypatch):
    lines = output(capsys, "draw", "--seq", "6", "--heads", "1", "--segments", "2,6", "--rates", "1,3").splitlines()
    start = lines.index("head 0") + 1
    assert [line.rstrip() for line in lines[start : start + 6]] == [":. .", "..", "  ..", ". .:", "    ..", "    .."]
    assert lines[-1] == "count:   0   . 1   : 2"
    report = json_output(capsys, "draw", "--seq", "3", "--heads", "1", "--segments", "dense", "--causal")
    assert (report["count"], report["largest"]) == ([[[1, 0, 0], [1, 1, 0], [1, 1, 1]]], 1)
    monkeypatch.setenv("COLUMNS", "50")
    assert "one cell stands for 3 x 3 tokens" in output(capsys, "draw", "--seq", "120")


def test_draw_shows_what_decoding_keeps(capsys):
    lines = output(capsys, "draw", "--kept", "--seq", "6", "--heads", "1", "--segments", "4", "--rates", "2").splitlines()
    start = lines.index("head 0") + 1
    assert [line.rstrip() for line in lines[start : start + 6]] == [".", ".", "", "", "    .", "    ."]
    assert lines[1] == "down: tokens, across: keys"
    assert main(["draw", "--kept", "--causal"]) == 2


@pytest.mark.parametrize(
    "options",
    [["--causal", "--heads", "5"], ["--kept"], ["--segments", "2,3,4,5,6,7,8,9,10,11", "--rates", ",".join("1" * 10)]],
)
def test_draw_writes_a_picture(capsys, tmp_path, options):
    pytest.importorskip("matplotlib")
    path = tmp_path / "count.png"
    assert output(capsys, "draw", "--seq", "20", "--segments", "4,20", *options, "--out", str(path)) == f"wrote {path}\n"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_draw_without_matplotlib_names_the_extra(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["draw", "--out", str(tmp_path / "x.png")]) == 2
    assert "pip install 'dilkit[plot]'" in capsys.readouterr().err
    assert "head 0" in output(capsys, "draw")
