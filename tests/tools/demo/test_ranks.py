"""`dilkit demo --ranks`."""

import json
import signal
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from helpers import launch
from helpers.project import succeed

from dilkit import environment
from dilkit.comm import run_threads
from dilkit.tools import cli
from dilkit.tools.console import interrupt
from dilkit.tools.demo import ranks
from dilkit.tools.demo.trainer import judgements, rows_by_name, shared_clock
from dilkit.tools.report import registry

SMALL = ("--context", "128", "--steps", "3", "--threads", "1")


def test_all_ranks_stop_after_the_same_step():
    def rank(comm):
        stop = threading.Event()
        assert shared_clock(comm, stop, float(comm.rank)) == 0.0
        if comm.rank == 1:
            stop.set()
        with pytest.raises(KeyboardInterrupt):
            shared_clock(comm, stop, 1.0)

    run_threads(2, rank)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_interrupts(number):
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


def check_report(out, replicas, sequence):
    """Both trainings agree, and what was sent is what was planned; the result."""
    result = registry.read(out / "report.json")
    assert (result.interrupted, result.facts["world_size"]) == (False, replicas * sequence)
    assert [row.verdict for row in rows_by_name(result, "differences").values()] == ["measured"] * 3
    for who, row in rows_by_name(result, "training").items():
        assert (row.values["steps"], row.values["tokens"]) == (3, 3 * 128 * replicas)
        assert judgements(result, who)[-1]["loss"] < judgements(result, who)[0]["loss"]
    assert [plot.kind for plot in registry.document_of(out / "report.json").plots] == ["lines"]
    assert "differ by rounding" in registry.sentence_of(out / "report.json")
    return result


def test_ranks_learn_what_one_process_learns_or_the_command_ends_with_1(text, tmp_path, monkeypatch, capsys):
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
def test_the_ranks_may_be_those_of_torchrun(text, tmp_path, replicas, sequence):
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


def test_ranks_of_another_job_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(environment, "launch", lambda: environment.Launch("torchrun", 0, 2, 0, 2))
    assert cli.main(["demo", "--ranks", "2x2"]) == 2
    assert "2x2 is 4 ranks, but torchrun started 2; run torchrun --nproc-per-node 4" in capsys.readouterr().err
