"""`dilkit demo` over ranks, and with --ranks: what one rank learns, printed once, ended together, compared with one process."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import launch
from helpers.project import succeed

from dilkit import environment
from dilkit.comm import Comm, run_threads
from dilkit.tools import cli
from dilkit.tools.console import interrupt
from dilkit.tools.demo import ranks
from dilkit.tools.demo.corpus import Corpus
from dilkit.tools.demo.trainer import Trainer, judgements, rows_by_name
from dilkit.tools.demo.transformer import ModelConfig, SharedTextTask, TextTask, load_model, seeded_model
from dilkit.tools.report import registry
from dilkit.tools.results.rows import RowsResult

THREADS = ("demo", "--comm", "threads", "--world-size", "2", "--context", "256", "--threads", "1")
SMALL = ("--context", "128", "--steps", "3", "--threads", "1")


def demo_losses(comm: Comm | None) -> dict[str, Any]:
    text, config = bytes(i * i % 251 for i in range(8000)), ModelConfig(context=1024, width=32, layers=2)
    corpus, model = Corpus(text, text[:2050], {}), seeded_model(config, 0, comm)
    task = TextTask(model, corpus, 1024, 0) if comm is None else SharedTextTask(comm, model, corpus, 1024, 0)
    trainer = Trainer(task, steps=20)
    points = [*trainer.run(8)]
    losses = [loss for *_, loss in trainer.curve] + [point["loss"] for point in points]
    parameters = [p.detach().clone() for p in model.parameters()]
    if comm is not None:
        comm.agree(repr([p.double().sum().item() for p in parameters]).encode(), "parameters")
    return dict(losses=losses, parameters=parameters)


@functools.cache
def one_rank() -> dict[str, Any]:
    return demo_losses(None)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_loss_is_that_of_one_rank(world_size: int) -> None:
    found = run_threads(world_size, demo_losses)
    assert len(one_rank()["losses"]) == 20 + 9
    for rank in found:
        torch.testing.assert_close(rank["losses"], one_rank()["losses"], rtol=1e-4, atol=0)
        assert all(map(torch.equal, rank["parameters"], found[0]["parameters"]))


def test_one_rank_prints_and_writes(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert cli.main([*THREADS, "--steps", "3", "--text", text, "--out", str(out)]) == 0
    said = capsys.readouterr()
    for once in ("held out: 7.", "3 steps on 2 ranks (ThreadComm) in float32, threads: 1", "trained for"):
        assert said.out.count(once) == 1, said.out
    assert said.err.count("wrote report") == 1
    assert not json.loads((out / "report.json").read_text())["interrupted"]
    assert "Dilated against dense" not in (out / "report.md").read_text()
    assert (out / "report.png").exists()
    assert load_model(out / "model.pt").config.context == 256


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_all_ranks_after_the_same_step(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def backward(self, loss):
        if self.comm.rank == 1:
            calls.append(1)
        if self.comm.rank == 1 and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)  # the main thread takes it
        return original(self, loss)

    original, calls = SharedTextTask.backward, []
    monkeypatch.setattr(SharedTextTask, "backward", backward)
    command = [*THREADS, "--steps", "1000", "--text", text, "--out", str(tmp_path / "out")]
    assert cli.main(command) == interrupt.INTERRUPTED
    result = registry.read(tmp_path / "out" / "report.json")
    assert isinstance(result, RowsResult)
    assert (result.interrupted, result.facts["stage"], rows_by_name(result, "training")["text"].values["steps"]) == (
        True,
        "training",
        3,
    )
    assert capsys.readouterr().out.count("INTERRUPTED while training") == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with interrupt.stopping() as stop:
        assert not stop.is_set()
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert stop.is_set()
        time.sleep(interrupt._SAME + 0.1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(number) is before


def check_report(out: Path, replicas: int, sequence: int) -> RowsResult:
    """Both trainings agree, and what was sent is what was planned; the result."""
    result = registry.read(out / "report.json")
    assert isinstance(result, RowsResult)
    assert (result.interrupted, result.facts["world_size"]) == (False, replicas * sequence)
    assert [row.verdict for row in rows_by_name(result, "differences").values()] == ["measured"] * 3
    for who, row in rows_by_name(result, "training").items():
        assert (row.values["steps"], row.values["tokens"]) == (3, 3 * 128 * replicas)
        assert judgements(result, who)[-1]["loss"] < judgements(result, who)[0]["loss"]
    assert result.facts["counted"] == [3 * planned for planned in result.facts["planned"]] * replicas
    assert [plot.kind for plot in registry.document_of(out / "report.json").plots] == ["lines", "bars", "points"]
    assert "differ by rounding" in registry.sentence_of(out / "report.json")
    assert "comparison: full KV ring" in (out / "report.md").read_text()
    return result


def test_ranks_learn_what_one_process_learns_or_the_command_ends_with_1(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch._server()  # has loaded torch
    monkeypatch.setattr(ranks, "PROCESSES", launch.CONTEXT)
    command = ["demo", "--ranks", "1x2", "--json", "--text", text, "--out", str(tmp_path / "out"), *SMALL]
    assert cli.main(command) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "out" / "report.json").read_text())
    result = check_report(tmp_path / "out", 1, 2)
    steps, exact = [row for row in result.rows if row.table == "steps"], {"weight": torch.linspace(-1, 1, 9)}

    def wrong(name="", factor=1.0, parameters=1.0):
        """Return what is more than rounding where the last step of one process has this factor, or the parameters."""
        values = steps[-1].values | {name: steps[-1].values.get(name, 0.0) * factor}
        rows = [*steps[:-1], replace(steps[-1], values=values)]
        return {
            row.who for row in ranks.compared(rows, exact, {"weight": exact["weight"] * parameters}) if row.verdict == "wrong"
        }

    assert wrong() == wrong(parameters=1.00001) == set()
    assert wrong(ranks.LOSS_OF_STEP, 0.99999) == wrong(ranks.LOSS_OF_STEP, float("nan")) == {ranks.LOSS_OF_STEP}
    assert wrong(ranks.NORM, 1.0001) == {ranks.NORM}
    assert wrong(parameters=1.0003) == {ranks.PARAMETERS}

    monkeypatch.setitem(ranks.GROWTH, ranks.PARAMETERS, 0.0)
    assert cli.main([one for one in command if one != "--json"]) == ranks.DIFFERS
    assert "differ by MORE THAN ROUNDING" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "sequence"), [(2, 2), (2, 1), (1, 3)])
def test_the_ranks_may_be_those_of_torchrun(text: str, tmp_path: Path, replicas: int, sequence: int) -> None:
    """The largest job is one of processes that the command starts."""
    size = f"{replicas}x{sequence}"
    command = ["-m", "dilkit", "demo", "--ranks", size, "--text", text, "--out", str(tmp_path / "out"), *SMALL]
    if size == "2x2":
        said = succeed(sys.executable, *command, cwd=tmp_path)
    else:
        ended = launch.starter("gloo")("torch", replicas * sequence, command).finish()
        assert ended.code == 0, ended
        said = ended.text
    assert said.count("differ by rounding") == 1, said
    check_report(tmp_path / "out", replicas, sequence)


def test_ranks_of_another_job_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(environment, "launch", lambda: environment.Launch("torchrun", 0, 2, 0, 2))
    assert cli.main(["demo", "--ranks", "2x2"]) == 2
    assert "2x2 is 4 ranks, but torchrun started 2; run torchrun --nproc-per-node 4" in capsys.readouterr().err
