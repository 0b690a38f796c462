"""A GPU day without a GPU."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers import gpu_day, stored_oracle
from helpers.gpu_calls import sanitizer_findings
from helpers.gpu_day import KIND, Recorder
from helpers.project import ROOT
from helpers.small_suites import CONFIGURATIONS, run
from helpers.stored_oracle import StoredOracle

from dilkit.environment import CUDA_CACHE, TUNED, cuda_cache
from dilkit.selection import tuned
from dilkit.selector import select
from dilkit.testing import conformance
from dilkit.testing.problems import Case
from dilkit.tools import cli
from dilkit.tools.bench import suites
from dilkit.tools.bench.suites import preferences
from dilkit.tools.bench.suites.gpu_day import REPORT
from dilkit.tools.bench.suites.preferences import DTYPES, PICK, preference_rows
from dilkit.tools.commands.verify import LISTED
from dilkit.tools.results.file import read_result, write_result
from dilkit.tools.results.rows import RowsResult

CALL = 540
"""Seconds of a call, in which torch is loaded, too."""
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
def script():
    return module_of("run")


def module_of(name):
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(f"gpu_day_{name}", ROOT / "tests" / "gpu" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step_named(script, name):
    return next(step for step in script.PLAN if step.name == name)


def day(folder):
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


def test_a_hung_test_costs_itself_alone_and_a_second_run_goes_on(tmp_path, script):
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
    (tmp_path / "day.json").rename(tmp_path / "gpu-day.json")
    command = script.Day(tmp_path, False).command(step_named(script, "gpu-bfloat16"))
    assert "cupy_raw" not in " ".join(command), "what failed a test is not timed"
    assert command[command.index("--backend") + 1].startswith("automatic,triton,sdpa:")
    (tmp_path / "gpu-day.json").rename(tmp_path / "day.json")
    assert len(Recorder(tmp_path / "day.json", "cpu").passed) == 3
    rows = tuple(replace(row, values=row.values | dict(code="other")) for row in again.rows if "ended" in row.values)
    write_result(replace(again, rows=rows), tmp_path / "day.json")
    assert not Recorder(tmp_path / "day.json", "cpu").result.rows, "with other code all run again"
    write_result(replace(again, environment=replace(again.environment, device_name="H100")), tmp_path / "day.json")
    with pytest.raises(pytest.UsageError, match="of another device"):
        Recorder(tmp_path / "day.json", "cpu")


def test_a_test_runs_again_where_its_own_backend_has_changed(monkeypatch):
    left_out = {}
    monkeypatch.setattr(gpu_day, "files_digest", lambda *folders, without: left_out.update({folders[-1]: without}) or "")
    for name in ("of_triton.py::test_it[triton-large]", "of_all.py::test_it[32]"):
        gpu_day.digest_of_test(name)
    assert left_out == {"of_triton.py": ("backends/cuda", "backends/numba", "backends/flex"), "of_all.py": ()}


def test_the_plan_fits_into_a_call_and_all_that_it_names_is_there(script, tmp_path):
    plan, suite, parser = script.PLAN, suites.suite("gpu"), cli.parser_of("bench")
    shares = [step.seconds for step in plan]
    assert sum(shares) <= CALL
    assert 0 not in shares[: shares.index(0)] + shares[: -shares.count(0)], "what has no share comes last"
    assert [step.name for step in plan[:5]] == ["load", "proofs", "times", "counters", "sanitizers"]
    assert len({step.name for step in plan}) == len(plan) == len([*script.lines({})]) - 1
    names = "".join(path.read_text() for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    for step in plan:
        assert all(word in f"{names} and or not times" for word in re.findall(r"\w+", step.tests)), step.name
        if step.suite:
            args = parser.parse_args(script.Day(tmp_path, False).command(step)[4:])
            assert (args.suite, ",".join(args.rows or ()), args.backend) == (step.suite, step.words, step.backends)
    parts = [suite(rows=(step.words,)).steps() for step in plan if step.name.startswith("gpu-")]
    assert Counter(one.what for part in parts for one in part) == Counter(one.what for one in suite().steps())


def test_a_step_that_hangs_is_ended_and_the_next_one_runs(script, tmp_path, monkeypatch):
    assert [script.limited(["sh", "-c", "exit 3"], seconds) for seconds in (60.0, 5.0)] == [3, None], "5 s are too few"
    monkeypatch.setattr(script, "GRACE", 0.2)
    monkeypatch.setattr(script, "LEAST", 0.1)
    monkeypatch.setattr(script, "PLAN", [replace(script.PLAN[0], name=name, seconds=1) for name in ("hangs", "absent", "ends")])
    commands = {"hangs": ["sleep", "60"], "absent": [], "ends": ["true"]}
    monkeypatch.setattr(script.Day, "command", lambda self, step: commands[step.name])
    for ends in ("done", "before"):
        day = script.Day(tmp_path, False)
        day.run()
        assert day.left == ["hangs"]
        assert [took.split(", ")[-1] for took in day.took.values()] == ["deadline", "absent", ends]
    day.code = "other"
    assert not day.done(script.PLAN[2])


def test_a_suite_goes_on_with_the_same_code_alone(script, tmp_path, monkeypatch):
    (tmp_path / "preferences").mkdir()
    file = tmp_path / "preferences" / "suite.json"
    step, result = step_named(script, "preferences"), json.loads((ROOT / "docs/results/gpu-h200.json").read_text())
    day = script.Day(tmp_path, False)
    for interrupted in (True, False):
        file.write_text(json.dumps(result | dict(interrupted=interrupted)))
        day.steps = {step.name: dict(code="other")}
        assert (day.done(step), "--resume" in day.command(step)) == (False, False)
        day.keep(step, None)
        assert (day.done(step), "--resume" in day.command(step)) == (not interrupted, True)
    day.code = "other"
    monkeypatch.setattr(script, "PLAN", [step])
    day.run(0.0)
    assert not file.exists(), "which a third call would go on with"


def test_stored_results_of_the_oracle_are_taken_for_the_same_inputs_alone(script, tmp_path, monkeypatch):
    case = next(case for case in LISTED if case.mask != "none" and case.dtype == "bfloat16")
    monkeypatch.setattr(script, "LARGE", (case,))
    monkeypatch.setattr(script, "compile_all", lambda *of: [] if (cuda_cache() / "a.cubin").write_text("code") else None)
    monkeypatch.setenv(CUDA_CACHE.name, "")
    assert script.main([str(tmp_path), "--prepare", "sm_90"]) == 0
    monkeypatch.setattr(script, "store", None)
    assert script.main([str(tmp_path), "--prepare", "sm_90"]) == 0, "results of the same code are not computed anew"
    script.unpack(tmp_path)
    assert (tmp_path / script.KERNELS / "a.cubin").read_text() == "code"
    file, want, computed = tmp_path / script.ORACLE, conformance.expected(case), list[Case]()
    monkeypatch.setattr(conformance, "expected", lambda case: computed.append(case) or want)
    found = StoredOracle(file, "cpu").expected(case)
    assert (found.error, {*found.exact}, computed) == (want.error, {*want.exact}, [])
    assert all(torch.equal(x, want.exact[name]) for name, x in found.exact.items())

    def computes(oracle):
        computed.clear()
        return oracle.expected(case) is want and computed == [case]

    for of_other in (dict(inputs=""), dict(inputs=stored_oracle._digest(case), error={})):
        stored = StoredOracle(file, "cpu")
        stored.cases[case.name] = of_other
        stored.samples[f"{case.name} dk"] = stored.samples[f"{case.name} dk"] + 1e-6
        assert computes(stored), "its inputs are others, or the device computes other numbers"
    with monkeypatch.context() as patch:
        patch.setattr(stored_oracle, "files_digest", lambda *folders: "other")
        assert computes(StoredOracle(file, "cpu")), "the oracle is another"
    assert computes(StoredOracle(tmp_path / "nothing.npz", "cpu"))
    file.write_bytes(file.read_bytes()[:1000])
    assert computes(StoredOracle(file, "cpu")), "the file is cut"


def test_ncu_is_read_and_a_tool_that_is_absent_is_named(monkeypatch):
    times, kernels = module_of("test_times"), module_of("test_kernels")
    lines = ["==PROF==", '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    lines += [f'"{i}","mma_forward(Arguments)","Duration","us","{i}"' for i in range(2)]
    assert times.first_launches(lines) == {"mma_forward": {"Duration": "0 us"}}
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(pytest.skip.Exception, match="ncu is not on the path"):
        times.test_counters_of_the_profiler("cupy_raw", "cpu", None, None, None)
    with pytest.raises(pytest.skip.Exception, match="compute-sanitizer is not on the path"):
        kernels.test_the_sanitizer_finds_nothing("memcheck", "cupy_raw", "cpu", None, None)


def test_what_the_sanitizer_says_is_read():
    assert sanitizer_findings("========= Invalid __global__ read of size 4\n========= ERROR SUMMARY: 1 error")
    assert not sanitizer_findings("========= ERROR SUMMARY: 0 errors\ncomputed 16 of 16 cases rightly")


def with_times(result, case, **seconds):
    rows = [replace(row, samples=(seconds[row.who],)) if row.case == case and row.who in seconds else row for row in result.rows]
    return replace(result, rows=tuple(rows))


def test_the_sweep_finds_a_wrong_row_and_tune_makes_the_choice_go_by_it(
    tmp_path, monkeypatch, capsys, tiny_yardsticks, without_pictures
):
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
@pytest.mark.timeout(1200)
def test_a_rehearsal_runs_the_plan_on_the_cpu(tmp_path):
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "run.py"), str(tmp_path), "--rehearse"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "found something WRONG, 0 of" in done.stdout
    assert ", deadline" not in done.stdout
    result = read_result(tmp_path / "gpu-day.json", RowsResult, KIND)
    passed = [row.case["name"] for row in result.rows if row.values.get("ended") == "passed"]
    assert all(
        any(name in test for test in passed) for name in ("two_ranks", "every_kernel_is_launched", "problem_list", "compiled")
    )
    assert Recorder(tmp_path / "gpu-day.json", "cpu").passed == passed, "which do not run again"
    assert "found something WRONG" in (tmp_path / "gpu-day.md").read_text()
