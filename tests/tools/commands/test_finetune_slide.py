"""`dilkit finetune-slide`."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from helpers.command_line import json_output, output
from helpers.slide_tables import cohort

from dilkit import environment
from dilkit.integrations.gigapath.finetuning.model import load_head
from dilkit.tools.commands import encode_slide
from dilkit.tools.console import progress

SIZES = "--embed-dim=16,--depth=1,--num-heads=2,--ngrids=8,--epochs=2,--accumulate=3,--resamples=9"


@pytest.mark.usefixtures("without_pictures")
def test_a_run_and_its_report(tmp_path, capsys, monkeypatch):
    cohort(tmp_path, survival=True)
    out = str(tmp_path / "out")
    command = ["finetune-slide", str(tmp_path / "labels.csv"), str(tmp_path), "--out", out, *SIZES.split(",")]
    assert "C-index" in (text := output(capsys, *command))
    assert output(capsys, "report", f"{out}/finetune.json").splitlines()[1:] == text.splitlines()
    assert not output(capsys, *command, code=2)
    run = json.loads(output(capsys, *command, "--resume", "--json"))
    risks = {one["slide"]: one["risk"] for one in run["facts"]["run"]["predictions"]}
    assert len(risks) == 12
    features, model = str(tmp_path), f"{out}/model.pt"
    predict = ["predict-slide", features, "--out", str(tmp_path / "new"), "--checkpoint"]
    predicted = {one["slide"]: one["risk"] for one in json_output(capsys, *predict, model)["predictions"]}
    assert predicted == pytest.approx(risks, abs=1e-5)
    assert "wrote" in output(capsys, *predict, model)
    lines = (tmp_path / "new" / "predictions.csv").read_text().splitlines()
    assert (lines[0], len(lines)) == ("slide,tiles,risk", 13)
    assert not output(capsys, *predict, f"{out}/checkpoint.pt", code=2)
    torch.save({"features": torch.zeros(2, 1), "coords": torch.zeros(2, 2)}, tmp_path / "s1.pt")  # it has an older embedding
    now = json.loads(output(capsys, *predict, model, "--json", code=1))
    assert ({one["slide"] for one in now["predictions"]}, len(now["refused"])) == (risks.keys() - {"s1"}, 1)
    monkeypatch.setattr(encode_slide, "run", lambda args: 1)
    monkeypatch.setattr(environment, "launch", lambda: SimpleNamespace(rank=1))
    assert not output(capsys, *predict, model)  # exit code 0: torchrun would stop the first rank before it has written


def test_probabilities_of_classes(tmp_path):
    head = {"weight": torch.eye(2, 3), "bias": torch.zeros(2)}
    torch.save({"model": {}, "head": head, "classes": ["no", "yes"]}, tmp_path / "model.pt")
    one = load_head(tmp_path / "model.pt")
    assert one.columns == ("no", "yes")
    assert one.predict(torch.tensor([0.0, math.log(3), 7.0])) == pytest.approx([0.25, 0.75])


def test_progress_without_a_terminal_is_lines(capsys, monkeypatch):
    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "BETWEEN", 0.0)
    with progress.shown("step") as move, progress.shown("tile", hidden=True) as unseen:
        for step in (1, 13):
            move(step, 13, 0.25)
            unseen(step, 13)
    *_, last = capsys.readouterr().err.splitlines()
    assert "13/13" in last
    assert "loss=0.2500" in last
    assert "tile" not in last
