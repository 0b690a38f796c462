"""The matrix of surroundings: what it counts, and what it shows of a row that cannot be run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from matrix import run
from matrix.variations import CXX, PYTHONS, Variation, interpreter, variations


def test_variations_have_names_of_their_own_and_python_is_not_tried_twice() -> None:
    found = [variation.name for variation in variations()]
    assert len(found) == len({*found})
    names = {"torch default", "dilkit generic", "threads 4", "LANG=C", "path", "no C++", "one core", "another user"}
    assert {*names, "newest packages"} <= {*found}
    assert len([name for name in found if name.startswith("Python")]) == len({*PYTHONS} - {"{}.{}".format(*sys.version_info)})


def test_an_interpreter_that_does_not_start_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    broken, working = tmp_path / "python3.13", tmp_path / "versions/3.13.1/bin/python"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    assert interpreter("3.13") == ""
    working.parent.mkdir(parents=True)
    working.symlink_to(sys.executable)
    assert interpreter("3.13") == str(working)


def test_a_row_without_a_command_has_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first").mkdir()
    for name in ("g++", "x86_64-linux-gnu-g++-12", "gcc"):
        (tmp_path / "first" / name).touch()
    monkeypatch.setenv("PATH", f"{tmp_path / 'first'}:{tmp_path / 'absent'}")
    found = run.surroundings(Variation("no C++", without=CXX), tmp_path)
    assert [path.name for path in Path(found["PATH"]).iterdir()] == ["gcc"]


def test_rows_are_counted_and_a_failure_decides_on_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os, pytest\ndef test_number(): assert os.environ['OMP_NUM_THREADS'] == '2'\ndef test_skip(): pytest.skip('no')\n"
    )
    made_up = [
        Variation("two", {"OMP_NUM_THREADS": "2"}),
        Variation("one", {"OMP_NUM_THREADS": "1"}),
        Variation("x", missing="no x"),
    ]
    monkeypatch.setattr(run, "variations", lambda: made_up)
    monkeypatch.setattr(run, "WORKERS", ("-p", "no:xdist", "-c", str(tmp_path / "none.ini")))
    (tmp_path / "none.ini").touch()

    def matrix(*options: str) -> tuple[int, dict[str, Any] | str]:
        monkeypatch.setattr(sys, "argv", ["run.py", "--json", *options, str(tmp_path)])
        return run.main(), json.loads(capsys.readouterr().out)

    code, found = matrix()
    assert code == 1
    two, one, absent = found["rows"]
    assert [two[name] for name in run.OUTCOMES] == [1, 0, 1]
    assert [one[name] for name in run.OUTCOMES] == [0, 1, 1]
    assert [failure.endswith("::test_number") for failure in one["failures"]] == [True]
    assert absent == {"name": "x", "skipped_because": "no x", "failures": []}
    assert "x    not run: no x" in run.table(found["rows"])
    assert matrix("--only", "x")[0] == 0
    assert matrix("--only", "nothing")[0] == 1
