"""`dilkit demo` over ranks: what one rank learns, printed once, ended together."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dilkit.comm import Comm, run_threads
from dilkit.tools import cli
from dilkit.tools.console import interrupt
from dilkit.tools.demo.text.model import ModelConfig, load_model
from dilkit.tools.demo.text.record import Budget
from dilkit.tools.demo.text.task import TextTask, held_out_windows
from dilkit.tools.demo.trainer import Trainer

THREADS = ("demo", "--comm", "threads", "--world-size", "2", "--context", "256", "--steps", "3", "--threads", "1")


CONFIG = ModelConfig(context=1024, width=32, layers=2)
TEXT = bytes(i * i % 251 for i in range(8000))


def demo_losses(comm: Comm) -> dict[str, Any]:
    task = TextTask(TEXT, held_out_windows(TEXT, CONFIG.context)[:2], CONFIG, 0, comm)
    trainer = Trainer(task, Budget(steps=20))
    trainer.run(8, lambda: None, lambda: None)
    losses = [loss for *_, loss in trainer.curve] + [point.held_out for point in trainer.points]
    parameters = [p.detach().clone() for p in task.model.parameters()]
    comm.agree(repr([p.double().sum().item() for p in parameters]).encode(), "parameters")
    return dict(losses=losses, parameters=parameters)


@functools.cache
def one_rank() -> dict[str, Any]:
    return run_threads(1, demo_losses)[0]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_loss_is_that_of_one_rank(world_size: int) -> None:
    found = run_threads(world_size, demo_losses)
    assert len(one_rank()["losses"]) == 20 + 9
    for rank in found:
        torch.testing.assert_close(rank["losses"], one_rank()["losses"], rtol=1e-4, atol=0)
        assert all(map(torch.equal, rank["parameters"], found[0]["parameters"]))


def check_report(out: Path, transport: str) -> None:
    report = json.loads((out / "report.json").read_text())
    assert report["interrupted"] is None
    assert (report["ranks"]["world_size"], report["ranks"]["transport"]) == (2, transport)
    assert "Dilated against dense" not in (out / "report.md").read_text()
    assert (out / "report.png").exists()
    assert load_model(out / "model.pt").config.context == 256


def test_one_rank_prints_and_writes(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*THREADS, "--text", text, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    for once in ("held out: 7.", "3 steps on 2 ranks (ThreadComm) of 1 thread", "trained for"):
        assert said.out.count(once) == 1, said.out
    assert said.err.count("wrote report") == 1
    check_report(tmp_path / "out", "ThreadComm")


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_all_ranks_after_the_same_step(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def backward(self: TextTask, spent: float) -> tuple[float, int]:
        if self.comm.rank == 1:
            calls.append(1)
        if self.comm.rank == 1 and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            while not self.stop.is_set():
                time.sleep(0.001)
        return original(self, spent)

    original, calls = TextTask.backward, []
    monkeypatch.setattr(TextTask, "backward", backward)
    command = [*THREADS, "--text", text, "--out", str(tmp_path / "out")]
    command[command.index("--steps") + 1] = "1000"
    assert cli.main(command) == interrupt.INTERRUPTED
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["interrupted"], report["training"]["steps"]) == ("training", 3)
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
