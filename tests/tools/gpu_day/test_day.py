"""`dilkit gpu-day`: deadlines, what is kept, what is not timed, and what `dilkit tune` makes of the sweep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.gpu_day_steps import plan, until_it_hangs
from helpers.project import ROOT

from dilkit import Pattern, Problem
from dilkit.comm.launch import processes
from dilkit.device import probe
from dilkit.environment import TUNED
from dilkit.selection import tuned
from dilkit.selector import explain, select
from dilkit.tools import cli
from dilkit.tools.gpu_day import plan as planned
from dilkit.tools.gpu_day import stage, state
from dilkit.tools.gpu_day.document import document
from dilkit.tools.gpu_day.preferences import sweep
from dilkit.tools.gpu_day.record import STAGES, Choice, Finding, Found, GpuDayResult, StepRecord
from dilkit.tools.gpu_day.speed import suite
from dilkit.tools.gpu_day.step import Context
from dilkit.tools.results.record import Samples

CPU = Context("cpu")
PROBLEM = Problem(pattern=Pattern([16, 32], [1, 2]), seq=32, heads=4, head_dim=8)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a step adds a line to whenever it runs; the steps are those of the helpers."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.setattr(stage, "plan", lambda rehearse: plan(tmp_path / "log"))
    return tmp_path / "log"


def run(log: Path, name: str = "correctness", seconds: float = 300) -> GpuDayResult:
    return stage.run(name, CPU, log.parent / "out", seconds, say=lambda text: None)


def test_a_hung_step_costs_itself_alone_and_a_second_run_repeats_nothing(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(processes.Job, "_wait", until_it_hangs)
        result = run(log)
    steps = {step.name: step for step in result.steps}
    assert {name: step.ended for name, step in steps.items()} == dict(hangs="late", fails="failed", finds="done", last="done")
    assert all(steps[name].found.findings[0].found == "found" for name in ("hangs", "fails"))
    assert "gpu_day_steps.py" in steps["hangs"].reasons[0], "it says where it hung"
    assert "ZeroDivisionError" in steps["fails"].reasons[0]
    assert result.wrong == (("native", "float32"), ("numba_cuda", "")), "which is not timed"
    assert run(log).steps == result.steps
    assert run(log, "speed").steps[-1].found.findings[0].found == str(result.wrong)
    assert log.read_text() == "ran\n" * 2
    monkeypatch.setattr(state, "machine", lambda device: ("other code",))
    assert not state.begun(log.parent / "out", CPU, plan(log)).steps, "what other code found is not kept"


def choice(problem: Problem, **seconds: float) -> Choice:
    found = sweep.measured(problem, Context("cpu", rehearse=True))
    times = {name: replace(found.entries[name], time=Samples.of([taken])) for name, taken in seconds.items()}
    return replace(found, entries=found.entries | times)


def day(*choices: Choice, **fields: Any) -> GpuDayResult:
    """A day of one step."""
    found = Found(choices=choices, findings=(Finding(what="x", verdict="noted"),))
    record = StepRecord(stage="preferences", name="sweep 1", what="", inputs="", ended="done", seconds=1.0, found=found)
    facts = dict(rehearsal=False, setup=tuned.setup_of(probe("cpu")), plan=(("preferences", "sweep 1"), ("preferences", "tiles")))
    return state.new_result(GpuDayResult, probe("cpu"), steps=(record,), **facts | fields)


def test_a_wrong_row_is_found_and_tune_makes_the_choice_go_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_yardsticks: None
) -> None:
    found = choice(PROBLEM, native=0.3, sdpa=0.1)
    masked = choice(replace(PROBLEM, seq=64, key_padding_mask=True), native=0.1, sdpa=0.2)
    result = day(found, masked)
    tables = {table.title.partition(":")[0]: table.rows for table in document(result).tables}
    assert tables["Rows of the preference table"] == (("cpu, any dtype", "native", "2", "3.00", "WRONG in 1: sdpa"),)
    monkeypatch.setenv(TUNED.name, str(tmp_path / "tuned.json"))
    tuned.read_again()
    with pytest.warns(UserWarning, match="there is no such file"):
        assert select(PROBLEM).name == "native"
    state.write_result(day(found, rehearsal=True), tmp_path / "day.json")
    assert cli.main(["tune", "--take", str(tmp_path / "day.json")]) == 2, "it is of a rehearsal"
    state.write_result(result, tmp_path / "day.json")
    assert cli.main(["tune", "--take", str(tmp_path / "day.json")]) == 0
    assert "2 orders" in capsys.readouterr().out
    assert (select(PROBLEM).name, select(replace(PROBLEM, seq=64)).name) == ("sdpa", "native")
    assert explain(replace(PROBLEM, seq=64, key_padding_mask=True)).why.startswith("measured"), "and without a mask it is not"
    tuned.read_again()


def test_what_is_wrong_is_not_in_the_sweep(tiny_yardsticks: None) -> None:
    wrong = Context("cpu", rehearse=True, wrong=(("native", "float32"), ("sdpa", "bfloat16")))
    assert sorted(sweep.measured(PROBLEM, wrong).entries) == ["sdpa"]
    (found,) = suite.part(replace(CPU, wrong=(("cupy_raw", ""),)), "bfloat16", "longest")
    assert (found.verdict, found.found) == ("absent", "cupy_raw, which computes it, is wrong in bfloat16")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rehearsal_goes_through_a_step_of_each_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = tuple({step.run: step for step in reversed(planned.plan(True))}.values())
    for module in (stage, planned):
        monkeypatch.setattr(module, "plan", lambda rehearse: kinds[::-1])
    for name in STAGES:
        assert cli.main(["gpu-day", "--rehearse", "--stage", name, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert f"0 of {len(kinds)} steps are left" in said.out, said.err
    assert (tmp_path / "gpu-day.png").read_bytes().startswith(b"\x89PNG")
