"""`--pattern`: a pattern of any branches on the command line, as text or from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dilkit import GlobalTokens, Pattern, Problem, SlidingWindow, explain
from dilkit.tools.cli import main

PATTERN = Pattern.of(SlidingWindow(3), GlobalTokens([4]))


@pytest.mark.parametrize("as_file", [False, True])
def test_a_pattern_is_drawn(as_file: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = PATTERN.to_json()
    if as_file:
        (tmp_path / "pattern.json").write_text(given)
        given = str(tmp_path / "pattern.json")
    assert main(["draw", "--seq", "7", "--heads", "1", "--causal", "--pattern", given, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["pattern"] == json.loads(PATTERN.to_json())
    assert facts["count"] == PATTERN.count(7, 1, is_causal=True).tolist()


def test_info_says_who_computes_it(capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", "--device", "cpu", "--seq", "512", "--pattern", PATTERN.to_json()])
    picked = explain(Problem(pattern=PATTERN, seq=512, heads=8, head_dim=64)).picked
    said = capsys.readouterr().out
    assert str(PATTERN) in said
    assert any(line.split()[:2] == [picked, "picked"] for line in said.splitlines())
