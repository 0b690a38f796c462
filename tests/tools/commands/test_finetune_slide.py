"""`dilkit finetune-slide`: from a table and features to a page; what is wrong is one line."""

from pathlib import Path

import pytest
from helpers.command_line import output
from helpers.slide_tables import cohort

from dilkit.tools.cli import main

SIZES = ["--embed-dim=16", "--depth=1", "--num-heads=2", "--ngrids=8", "--epochs=2", "--accumulate=3", "--resamples=9"]


def test_a_run_and_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cohort(tmp_path / "slides", survival=True)
    command = [
        "finetune-slide",
        str(tmp_path / "slides/labels.csv"),
        str(tmp_path / "slides"),
        "--out",
        str(tmp_path / "out"),
        *SIZES,
    ]
    assert "C-index" in (text := output(capsys, *command))
    assert "random weights" in text
    assert output(capsys, "report", str(tmp_path / "out/finetune.json")).splitlines()[1:] == text.splitlines()
    assert main(command) == 2
    assert "checkpoint.pt is there, of an earlier run; resume goes on" in capsys.readouterr().err
    assert output(capsys, *command, "--resume", "--json").count('"line"') == 12
