"""Figures of suites by version."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.result_files import FOLDER, content, write

from dilkit.tools.site import history


def test_a_release_takes_the_runs_that_no_version_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "docs" / "results"
    shutil.copytree(FOLDER / "history", results / "history")
    write(results / "cpu.json", content("cpu-intel-xeon-avx2") | dict(date="2027-01-01T00:00:00+00:00"))
    monkeypatch.chdir(tmp_path)
    assert list(history.runs_by_version(results)) == ["0.2.0", "0.3.0", "next"]
    assert history.main(["0.4.0"]) == 0
    versions = history.runs_by_version(results)
    assert list(versions) == ["0.2.0", "0.3.0", "0.4.0"]
    assert [(run["suite"], run["date"]) for run in versions["0.4.0"]] == [("cpu", "2027-01-01T00:00:00+00:00")]
