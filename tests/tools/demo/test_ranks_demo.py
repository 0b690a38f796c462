"""`dilkit demo --ranks`: what ranks learn beside what one process learns, and what becomes of ranks that fail."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import launch
from helpers.project import succeed

from dilkit import environment
from dilkit.tools import cli
from dilkit.tools.demo.ranks import comparison, job, processes
from dilkit.tools.demo.ranks.layout import Layout
from dilkit.tools.demo.ranks.record import RanksDemoResult, RanksTraining
from dilkit.tools.report import registry

SMALL = ("--context", "128", "--steps", "3", "--threads", "1")


def check_report(out: Path, layout: Layout) -> RanksTraining:
    """Both trainings agree, and what was sent is what was planned; the training of one process."""
    found = registry.read(out / "report.json")
    assert isinstance(found, RanksDemoResult)
    assert (found.interrupted, found.layout, found.ranks.world_size) == (None, layout, layout.size)
    assert len(found.differences) == 3
    assert found.agrees
    for one in (found.alone, found.on_ranks):
        assert one is not None
        assert (one.steps, len(one.norms), one.tokens) == (3, 3, 3 * 128 * layout.data)
        assert one.points[-1].held_out < one.points[0].held_out
    assert found.sent.counted == tuple(3 * planned for planned in found.sent.planned) * layout.data
    document = registry.document_of(out / "report.json")
    assert [plot.kind for plot in document.plots] == ["lines", "bars", "points"]
    assert "differ by rounding" in registry.sentence_of(out / "report.json")
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "comparison: full KV ring" in (out / "report.md").read_text()
    assert found.alone is not None
    return found.alone


def differences(training: RanksTraining, change: dict[str, Any], weight: float = 1.0) -> dict[str, bool]:
    """True for what differs by rounding from a training with this change, and its parameter this factor."""
    weights = {"weight": torch.linspace(-1, 1, 9)}
    changed = {"weight": weights["weight"] * weight}
    found = comparison.differences(training, dataclasses.replace(training, **change), weights, changed)
    return {one.quantity.split()[0]: one.is_rounding for one in found}


def test_ranks_learn_what_one_process_learns_or_the_command_ends_with_1(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "start", launch.starter("gloo"))  # which forks the ranks
    out = tmp_path / "out"
    command = ["demo", "--ranks", "1x2", "--json", "--text", text, "--out", str(out), *SMALL]
    assert cli.main(command) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((out / "report.json").read_text())
    training = check_report(out, Layout(1, 2))
    assert differences(training, {}) == dict(loss=True, norm=True, parameters=True)
    assert differences(training, {}, 1.0003) == dict(loss=True, norm=True, parameters=False)
    norms = (*training.norms[:-1], 1.0001 * training.norms[-1])
    assert differences(training, dict(norms=norms)) == dict(loss=True, norm=False, parameters=True)
    first, (seconds, tokens, loss), last = training.train_curve
    for wrong in (0.99999 * loss, float("nan")):
        curve = first, (seconds, tokens, wrong), last
        assert differences(training, dict(train_curve=curve)) == dict(loss=False, norm=True, parameters=True)

    def work(self: job.RanksJob) -> None:
        self.differences = comparison.differences(training, training, {"weight": torch.ones(2)}, {"weight": torch.ones(2) * 1.01})

    monkeypatch.setattr(job.RanksJob, "work", work)
    assert cli.main([one for one in command if one != "--json"]) == job.DIFFERS
    assert "differ by MORE THAN ROUNDING" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("size", [Layout(2, 2), Layout(2, 1), Layout(1, 3)], ids=str)
def test_the_ranks_may_be_those_of_torchrun(text: str, tmp_path: Path, size: Layout) -> None:
    """The largest job is one of processes that the command starts."""
    command = ["-m", "dilkit", "demo", "--ranks", str(size), "--text", text, "--out", str(tmp_path / "out"), *SMALL]
    if size == Layout(2, 2):
        said = succeed(sys.executable, *command, cwd=tmp_path)
    else:
        ended = launch.starter("gloo")("torch", size.size, command).finish()
        assert ended.code == 0, ended
        said = ended.text
    assert said.count("differ by rounding") == 1, said
    check_report(tmp_path / "out", size)


def test_ranks_of_another_job_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(environment, "launch", lambda: environment.Launch("torchrun", 0, 2, 0, 2))
    assert cli.main(["demo", "--ranks", "2x2"]) == 2
    assert "2x2 is 4 ranks, but torchrun started 2; run torchrun --nproc-per-node 4" in capsys.readouterr().err
