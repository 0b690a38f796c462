"""The revision that results are of, files written in one step, and exponents."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from dilkit.tools.results.environment import git_state
from dilkit.tools.results.file import write_text
from dilkit.tools.results.statistics import exponent


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path) -> None:
    path = tmp_path / "new" / "bench.json"
    write_text(path, "whole")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half a file \ud800")
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_checkout_is_dirty_by_its_code_alone(tmp_path) -> None:
    def git(*command: str) -> str:
        names = [f"GIT_{role}_{what}" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")]
        env = {**os.environ, **dict.fromkeys(names, "somebody")}
        return subprocess.run(["git", *command], cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout.strip()

    assert git_state(tmp_path) == (None, None)
    files = [tmp_path / name for name in ("docs/results/cpu.json", "README.md", "tools/new.py")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("before")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    for file, dirty in zip(files, [False, False, True], strict=True):
        file.write_text("after")
        assert git_state(tmp_path) == (git("rev-parse", "HEAD"), dirty)


def test_the_exponent_is_the_slope_in_log_log() -> None:
    assert exponent([1, 2, 4, 8], [5.0, 20.0, 80.0, 320.0]) == pytest.approx(2.0)
    assert exponent([10, 1000], [7.0, 7.0]) == pytest.approx(0.0)
