"""A GPU day without a GPU: what the plugin keeps, what is not timed, and what `dilkit tune` makes of the sweep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.gpu_calls import sanitizer_findings
from helpers.gpu_day import KIND, Recorder
from helpers.project import ROOT
from helpers.small_suites import CONFIGURATIONS, run

from dilkit.environment import TUNED
from dilkit.selection import tuned
from dilkit.selector import select
from dilkit.tools import cli
from dilkit.tools.bench import suites
from dilkit.tools.bench.suites import preferences
from dilkit.tools.bench.suites.gpu_day import REPORT
from dilkit.tools.bench.suites.preferences import DTYPES, PICK, preference_rows
from dilkit.tools.results.file import read_result, write_result
from dilkit.tools.results.rows import RowsResult

TESTS = """\
import os, time
import pytest

pytestmark = pytest.mark.gpu

def test_right(record_property):
    record_property("gpu_day", ("verify x, all", "1 right", {"wrong": 0.0}))

@pytest.mark.parametrize("backend", ["cupy_raw", "triton"])
def test_wrong(backend):
    assert backend == "triton", "one is wrong"

def test_absent():
    pytest.skip("no such device")

@pytest.mark.timeout(0.5, method="thread")
def test_hangs():
    time.sleep(60)

def test_last():
    with open(os.environ["LOG"], "a") as log:
        log.write("ran\\n")
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("gpu_day_run", ROOT / "tests" / "gpu" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def day(folder: Path) -> RowsResult:
    (folder / "test_day.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "helpers.gpu_day",
        "-n",
        "1",
        "--gpu-device",
        "cpu",
        "--gpu-day",
        "day.json",
    ]
    variables = os.environ | dict(PYTHONPATH=str(ROOT / "tests"), LOG=str(folder / "log"))
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    return read_result(folder / "day.json", RowsResult, KIND)


def test_a_hung_test_costs_itself_alone_and_a_second_run_goes_on(tmp_path: Path, script: ModuleType) -> None:
    result = day(tmp_path)
    ended = {row.case["name"].partition("::")[2]: row.values["ended"] for row in result.rows if "ended" in row.values}
    wrong = {"test_wrong[cupy_raw]": "failed", "test_hangs": "failed"}
    assert (
        ended == {"test_right": "passed", "test_wrong[triton]": "passed", "test_absent": "skipped", "test_last": "passed"} | wrong
    )
    reasons = {row.case["name"].partition("::")[2]: row.reasons for row in result.rows if row.reasons}
    assert reasons["test_wrong[cupy_raw]"][0].startswith("AssertionError: one is wrong")
    assert "crashed" in reasons["test_hangs"][0]
    again = day(tmp_path)
    assert (tmp_path / "log").read_text() == "ran\n", "what passed does not run again"
    assert (len(again.rows), again.steps, again.done) == (len(result.rows), result.steps, 6)
    headline = REPORT.document(again).headline
    assert headline[0].startswith("2 of 6 steps of a GPU day found something WRONG, 0 of 6 steps are left")
    commands = [" ".join(command) for command in script.commands_of_suites("speed", tmp_path, tmp_path / "day.json")]
    assert "cupy_raw" not in " ".join(commands), "what failed a test is not timed"
    assert "--backend automatic,triton,sdpa:" in commands[0]
    assert len(Recorder(tmp_path / "day.json", "cpu").passed) == 3
    write_result(replace(again, facts=dict(code="other")), tmp_path / "day.json")
    assert not Recorder(tmp_path / "day.json", "cpu").passed, "with other code all run again"
    write_result(replace(again, environment=replace(again.environment, device_name="H100")), tmp_path / "day.json")
    with pytest.raises(pytest.UsageError, match="of another device"):
        Recorder(tmp_path / "day.json", "cpu")


def test_the_parts_of_the_gpu_suite_are_all_of_it(script: ModuleType) -> None:
    suite = suites.suite("gpu")
    parts = Counter((step.table, step.what) for word in script.PARTS for step in suite(rows=(word,)).steps())
    assert parts == Counter((step.table, step.what) for step in suite().steps())


def test_a_command_that_hangs_is_ended(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "GRACE", 0.2)
    assert script.limited(["sleep", "60"], 0.6) == 1
    assert script.limited(["sh", "-c", "exit 3"], 60.0) == 3


def test_a_complete_suite_is_not_measured_again(script: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "preferences"
    folder.mkdir()
    (command,) = script.command_of("preferences", folder, ["sdpa"])
    assert "--resume" not in command
    result = json.loads((ROOT / "docs/results/gpu-h200.json").read_text())
    for interrupted in (True, False):
        (folder / "suite.json").write_text(json.dumps(result | dict(interrupted=interrupted)))
        commands = list(script.command_of("preferences", folder, ["sdpa"]))
        assert [command[-1] for command in commands] == ["--resume"] * interrupted


def test_what_the_sanitizer_says_is_read() -> None:
    assert sanitizer_findings("========= Invalid __global__ read of size 4\n========= ERROR SUMMARY: 1 error")
    assert not sanitizer_findings("========= ERROR SUMMARY: 0 errors\ncomputed 16 of 16 cases rightly")


def with_times(result: RowsResult, case: dict[str, Any], **seconds: float) -> RowsResult:
    rows = [replace(row, samples=(seconds[row.who],)) if row.case == case and row.who in seconds else row for row in result.rows]
    return replace(result, rows=tuple(rows))


def test_the_sweep_finds_a_wrong_row_and_tune_makes_the_choice_go_by_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny_yardsticks: None,
    without_pictures: None,
) -> None:
    options, layer = ("--backend", "native,sdpa"), CONFIGURATIONS["B"]
    monkeypatch.setattr(preferences, "LAYERS", ((layer, False),))
    code, result = run("preferences", tmp_path, *options, device="cpu")
    assert (code, {row.verdict for row in result.rows if row.table == "sweep"}) == (0, {"measured"})
    first = result.cases("sweep")[0].case
    picked = next(row.values["picked"] for row in result.rows if row.case == first and row.who == PICK)
    other = "sdpa" if picked == "native" else "native"
    for case in result.cases("sweep"):
        result = with_times(result, dict(case.case), **{picked: 0.1, other: 0.1})
    result = with_times(result, dict(first), **{picked: 0.3})
    (rows,) = preference_rows(result)
    assert rows.rows[0][3:] == (f"3.00: {first['problem']}", f"WRONG in 1: {other}")
    monkeypatch.setenv(TUNED.name, str(tmp_path / "tuned.json"))
    tuned.read_again()
    assert cli.main(["tune", "--take", str(tmp_path / "suite.json")]) == 2, "it is of a quick run"
    write_result(replace(result, quick=0), tmp_path / "suite.json")
    assert cli.main(["tune", "--take", str(tmp_path / "suite.json")]) == 0
    assert f"{len(result.cases('sweep'))} orders" in capsys.readouterr().out
    assert select(layer.problem(64, dtype=DTYPES[0])).name == other
    tuned.read_again()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rehearsal_runs_the_tests_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "run.py"), str(tmp_path), "--rehearse"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "found something WRONG, 0 of" in done.stdout
    result = read_result(tmp_path / "gpu-day.json", RowsResult, KIND)
    passed = [row.case["name"] for row in result.rows if row.values.get("ended") == "passed"]
    assert all(
        any(name in test for test in passed) for name in ("two_ranks", "every_kernel_is_launched", "problem_list", "compiled")
    )
    assert Recorder(tmp_path / "gpu-day.json", "cpu").passed == passed, "which do not run again"
    assert "found something WRONG" in (tmp_path / "gpu-day.md").read_text()
