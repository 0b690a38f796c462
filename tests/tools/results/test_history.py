"""Figures by version: what a version's file holds, and which results are of an earlier one; files written in one step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.result_files import FOLDER, content, write

from dilkit.tools.results import history
from dilkit.tools.results.file import write_text
from dilkit.tools.site import history as pages


def checkout(folder: Path, **changes: Any) -> Path:
    """A folder with one result of the suite `orders`."""
    (folder / "docs/results/history").mkdir(parents=True, exist_ok=True)
    write(folder / "docs/results/orders.json", content("orders") | changes)
    return folder


def test_a_version_has_what_no_version_before_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout(tmp_path))
    for version in ("0.9.0", "0.10.0"):
        assert pages.main([version]) == 0
    (first,) = history.read_versions(Path("docs/results/history"))
    assert (first.version, [run.suite for run in first.runs]) == ("0.9.0", ["orders"])
    checkout(tmp_path, date="2027-01-01T00:00:00+00:00")
    assert "| 0.9.0 | next |" in pages.history(tmp_path)
    pages.main(["0.10.0"])
    assert [one.version for one in history.read_versions(Path("docs/results/history"))] == ["0.9.0", "0.10.0"]
    row = next(line for line in pages.history(tmp_path).splitlines() if "a warm order" in line)
    assert row.count(" us ") == 2


@pytest.mark.parametrize("wrong", [dict(version="0.2.1"), dict(kind="suite"), dict(runs=[{}]), dict(version="\x1b[1m")])
def test_a_file_that_is_no_versions_is_refused_by_name(wrong: dict[str, Any], tmp_path: Path) -> None:
    data = json.loads((FOLDER / "history" / "0.2.0.json").read_text())
    path = write(tmp_path / "0.2.0.json", data | wrong)
    with pytest.raises(history.ResultError, match=path.name):
        history.read_versions(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "bench.json"
    write_text(path, "whole")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half a file \ud800")
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]
