"""Published results are measured anew by one command, and stay as they are where that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from helpers.command_line import main
from helpers.measuring import shrink
from helpers.project import ROOT

from dilkit.tools.site import remeasure
from dilkit.tools.site.figures import NOTHING

RUN = subprocess.run
TINY = "bench --seq 64 --heads 2 --dim 8 --segments 16,32 --backend reference --repeats 2"


def in_this_process(command: list[str], cwd: str | None = None, **options: Any) -> CompletedProcess[Any]:
    """In the stead of a fresh Python, which would be most of the time."""
    if command[:3] != [sys.executable, "-m", "dilkit"]:
        return RUN(command, cwd=cwd, **options)  # git, say
    assert cwd
    with pytest.MonkeyPatch.context() as place:
        place.chdir(cwd)
        return CompletedProcess(command, main(command[3:]))


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_pictures: None) -> Path:
    shrink(monkeypatch)
    monkeypatch.setattr(remeasure.subprocess, "run", in_this_process)
    monkeypatch.setattr(remeasure, "COMMANDS", {"tiny": TINY, "wrong": f"{TINY} --budget nothing"})
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    for name in remeasure.COMMANDS:
        (folder / f"{name}.json").write_text("before")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_result_takes_the_place_of_the_one_before_and_what_fails_is_left_and_named(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert remeasure.main([]) == 1
    assert "left as before: wrong" in capsys.readouterr().err
    assert (checkout / "docs" / "results" / "wrong.json").read_text() == "before"
    found = json.loads((checkout / "docs" / "results" / "tiny.json").read_text())
    assert found["lengths"][0]["seq"] == 64
    assert str(checkout) not in found["command"], "the command of a published result names no folder of this machine"
    with pytest.raises(SystemExit):
        remeasure.main(["tinny"])
    assert "tinny: no such result; known: tiny, wrong" in capsys.readouterr().err


def test_every_published_result_of_a_cpu_can_be_measured_anew() -> None:
    """Of a command without a result yet, there is a page that says so."""
    folder = ROOT / "docs" / "results"
    published = {path.stem for path in folder.glob("*.json")}
    published |= {path.stem for path in folder.glob("*.md") if NOTHING in path.read_text()}
    assert {name for name in published if not name.startswith(("gpu", "kernels", "costs", "ptx"))} == set(remeasure.COMMANDS)
