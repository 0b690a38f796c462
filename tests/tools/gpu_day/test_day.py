"""`dilkit gpu-day`: deadlines, what is kept, what is not timed, and what `dilkit tune` makes of the sweep."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.gpu_day_steps import plan, until_it_hangs
from helpers.gpu_days import choice, day
from helpers.project import ROOT

from dilkit import Device, Pattern, Problem
from dilkit.backends.cuda import compile as cuda_compile
from dilkit.comm.launch import processes
from dilkit.device import probe
from dilkit.environment import CUDA_CACHE, TUNED
from dilkit.selection import tuned
from dilkit.selector import explain, select
from dilkit.testing.conformance import check
from dilkit.tools import cli
from dilkit.tools.gpu_day import backends, stage, state
from dilkit.tools.gpu_day import plan as planned
from dilkit.tools.gpu_day.correctness import checking, launches, sanitizer
from dilkit.tools.gpu_day.document import document
from dilkit.tools.gpu_day.preferences import counters, sweep
from dilkit.tools.gpu_day.record import GpuDayResult
from dilkit.tools.gpu_day.speed import suite
from dilkit.tools.gpu_day.step import Context

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


def test_a_stage_keeps_to_its_time_and_leaves_the_rest_to_the_next_run(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began_and_first_step = iter([0.0, 0.0])
    monkeypatch.setattr(stage, "time", SimpleNamespace(monotonic=lambda: next(began_and_first_step, 1.5)))
    monkeypatch.setattr(stage, "LEAST", 1.0)
    cut = run(log, seconds=1.5).steps
    assert [(step.name, step.ended) for step in cut] == [("hangs", "cut")]
    assert ("correctness", "hangs") in run(log, seconds=0).left


def test_a_wrong_row_is_found_and_tune_makes_the_choice_go_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_yardsticks: None
) -> None:
    found = choice(PROBLEM, native=0.3, sdpa=0.1)
    masked = choice(replace(PROBLEM, seq=64, key_padding_mask=True), native=0.1, sdpa=0.2)
    result = day(found, masked)
    tables = {table.title.partition(":")[0]: table.rows for table in document(result).tables}
    assert tables["Rows of the preference table"] == (("cpu, any dtype", "native", "2", "3.00", "WRONG in 1: sdpa"),)
    assert tables["The sweep"][0][1:4] == ("native", "sdpa", "3.00")
    assert "left, for which there was no time: tiles" in document(result).notes[-1]
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
    assert len(sweep.problems(probe("cpu"))) == 128
    assert [len({(step.stage, step.name) for step in steps}) - len(steps) for steps in map(planned.plan, (False, True))] == [0, 0]


def test_each_kernel_of_torch_is_verified_once() -> None:
    with backends.every_one(CPU) as names:
        assert "sdpa:cpu-flash" in names["torch"]
        assert len(set(names["torch"])) == len(names["torch"])


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["gpu-day", "--out", str(tmp_path)]) == 2
    assert "torch sees 0 CUDA devices; --rehearse shows on the CPU" in capsys.readouterr().err


@pytest.mark.slow
def test_carried_kernels_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy", reason="cupy is not installed: make kernels")
    monkeypatch.setenv(CUDA_CACHE.name, str(tmp_path / "cubins"))
    one = next(kernel for kernel in launches.needed((9, 0)) if kernel.name == "row_dots")
    assert launches.compile_all([one], (9, 0)) == []
    monkeypatch.setattr(cuda_compile, "compiled", None)
    assert len(cuda_compile.code_of(one, (9, 0))) > 1000


@pytest.mark.slow
def test_cases_are_checked_in_processes_of_their_own_until_their_time_is_over() -> None:
    some = sanitizer.small_cases()[:3]
    found = {
        result.case: result for result in checking.checked(("native", "cupy_raw"), some, CPU, 600) if result.backend == "native"
    }
    assert set(found) == set(some)
    for case, result in found.items():
        here = check("native", case)
        assert (result.verdict, result.reasons) == (here.verdict, here.reasons)
        assert result.ratios == pytest.approx(here.ratios, rel=1e-9), "other numbers of threads change the oracle's last bit"
    assert not list(checking.checked(("native",), some, CPU, 0))


def test_the_sanitizer_and_the_profiler_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / sanitizer.PROGRAM
    monkeypatch.setattr(backends, "ours", lambda context: ["cupy_raw"])
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:/bin")
    program, unusable = "computed 16 of 16 cases rightly", "Error: Device not supported"
    for text, result, verdict in (
        ("Invalid __global__ read", program, "wrong"),
        ("ERROR SUMMARY: 0 errors", program, "right"),
        (unusable, "computed 0 of 16 cases rightly", "absent"),
        (unusable, "", "absent"),
    ):
        tool.write_text(f"#!/bin/sh\necho '{result}'\necho '========= {text}'\nexit 1\n")
        tool.chmod(0o700)
        (found,) = sanitizer.sanitized(Context("cuda:0"), "memcheck")
        assert (found.verdict, found.backend) == (verdict, ""), "what it says is no reason to time nothing"
        assert text in found.found
    rows = [
        "ID,Kernel Name,Metric Name,Metric Unit,Metric Value",
        "0,f(X),Duration,us,12.5",
        "0,f(X),Other,,1",
        "1,f(X),Duration,us,9",
    ]
    lines = ['"' + row.replace(",", '","') + '"' for row in rows]
    assert counters.read(["==PROF== connected", *lines]) == {"f": {"Duration": "12.5 us"}}


def test_occupancy_is_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("cuda", "a GPU", (8, 6))
    monkeypatch.setattr(launches, "device_named", lambda name: device)
    monkeypatch.setattr(backends, "able", lambda context: ["cupy_raw"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: type("", (), dict(multi_processor_count=10)))
    monkeypatch.setattr(launches.CupyLauncher, "resident", lambda self, kernel, where: 10 * (kernel.blocks - (kernel.blocks > 3)))
    first, *others, summary = launches.loaded(Context("cuda:0"))
    assert "promises 4 blocks, the driver 3" in first.found
    assert f"{1 + len(others)} fewer" in summary.found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rehearsal_goes_through_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gpu-day", "--rehearse", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert f"0 of {len(planned.plan(True))} steps are left" in said.out, said.err
    assert (tmp_path / "gpu-day.png").read_bytes().startswith(b"\x89PNG")
