"""Files of figures by version, and files written in one step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.result_files import FOLDER, write

from dilkit.tools.results.file import ResultError, write_text
from dilkit.tools.site import history


@pytest.mark.parametrize("wrong", [dict(version="0.2.1"), dict(kind="suite"), dict(runs=[{}]), dict(version="\x1b[1m")])
def test_a_file_that_is_no_versions_is_refused_by_name(wrong: dict[str, Any], tmp_path: Path) -> None:
    data = json.loads((FOLDER / "history" / "0.2.0.json").read_text())
    path = write(tmp_path / "0.2.0.json", data | wrong)
    with pytest.raises(ResultError, match=path.name):
        history.read_versions(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "bench.json"
    write_text(path, "whole")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half a file \ud800")
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]
