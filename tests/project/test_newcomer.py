"""The newcomer's way of CI: what it hides, and that what it runs is there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers.project import ROOT
from matrix.variations import variations


@pytest.fixture
def newcomer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    import newcomer

    return newcomer


def test_what_a_newcomer_may_lack_is_hidden(newcomer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VIRTUAL_ENV", "DILKIT_CPU_ISA", "PYTEST_ADDOPTS"):
        monkeypatch.setenv(name, "x")
    (tmp_path / "made").mkdir()
    found = newcomer.surroundings(tmp_path / "made")
    assert not {"VIRTUAL_ENV", "DILKIT_CPU_ISA", "PYTEST_ADDOPTS"} & {*found}
    assert not [*Path(found["HOME"]).iterdir(), *Path(found["TMPDIR"]).iterdir()]
    assert not [name for name in newcomer.CXX if shutil.which(name, path=found["PATH"])]
    compiler = shutil.which("gcc", path=found["PATH"])
    if compiler is None:
        pytest.skip("there is no gcc")
    for flag, complains in (("-mavx512f", True), ("-mamx-tile", True), ("-O1", False)):
        done = subprocess.run([compiler, flag, "-E", "-"], input="int x;", capture_output=True, text=True, check=False)
        assert (f"unrecognized command-line option '{flag}'" in done.stderr) == complains


def test_its_rows_are_in_the_matrix(newcomer: ModuleType) -> None:
    names = {variation.name for variation in variations()}
    running = {"Python {}.{}".format(*sys.version_info)}
    assert {*newcomer.ROWS} <= names | running
