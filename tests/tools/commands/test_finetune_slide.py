"""`dilkit finetune-slide`: a run, its report, and the folder that holds one already."""

from pathlib import Path

import pytest
from helpers.command_line import output
from helpers.slide_tables import cohort

SIZES = "--embed-dim=16,--depth=1,--num-heads=2,--ngrids=8,--epochs=2,--accumulate=3,--resamples=9"


@pytest.mark.usefixtures("without_pictures")
def test_a_run_and_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cohort(tmp_path, survival=True)
    out = str(tmp_path / "out")
    command = ["finetune-slide", str(tmp_path / "labels.csv"), str(tmp_path), "--out", out, *SIZES.split(",")]
    assert "C-index" in (text := output(capsys, *command))
    assert output(capsys, "report", f"{out}/finetune.json").splitlines()[1:] == text.splitlines()
    assert not output(capsys, *command, code=2)
    assert output(capsys, *command, "--resume", "--json").count('"line"') == 12
