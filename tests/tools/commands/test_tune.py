"""`dilkit tune`."""

from dataclasses import replace
from typing import Any

import pytest
from helpers.command_line import json_output, output
from helpers.fakes import Doubles, Fake, registered
from helpers.measuring import interrupt_beyond
from helpers.triton_fakes import need_triton

from dilkit import Device, Limits, Pattern, Problem
from dilkit.backends.reference import Reference
from dilkit.backends.tiles.schedule import LOW_ROWS
from dilkit.backends.triton.backend import TUNED_ROLES
from dilkit.backends.triton.launch import DeviceLauncher
from dilkit.backends.triton.sizes import Sizes
from dilkit.environment import TUNED
from dilkit.selection import tuned, tuned_file
from dilkit.selector import explain, select
from dilkit.tools import cli
from dilkit.tools.commands import tune
from dilkit.tools.measure.case import CaseRunner
from dilkit.tools.measure.triton_sizes import candidates, fits

SHAPE = ["--heads", "4", "--dim", "8", "--segments", "16,32", "--rates", "1,2", "--device", "cpu", "--repeats", "2"]
PROBLEM = Problem(pattern=Pattern([16, 32], [1, 2]), seq=32, heads=4, head_dim=8)


@pytest.fixture(autouse=True)
def quick(monkeypatch, tiny_yardsticks):
    monkeypatch.setattr(tune, "MIN_TIME", 0.0)


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "dilkit" / "tuned.json"
    monkeypatch.delenv(TUNED.name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DILKIT_BACKEND", raising=False)
    tuned.read_again()
    yield path
    tuned.read_again()


@pytest.fixture
def times(monkeypatch):
    """Set the seconds of each backend in place of measuring; others are refused. Checks are real."""
    found = {}
    whole = CaseRunner.run

    def run(self, problem):
        case = whole(self, problem)
        fixed = {name: replace(e, samples=(found[name],)) for name, e in case["entries"].items() if e.samples and name in found}
        case["entries"] |= fixed
        return case

    monkeypatch.setattr(CaseRunner, "run", run)
    return found


def run(*arguments):
    return cli.main(["tune", *SHAPE, *arguments])


def report(capsys, *arguments, code=0):
    return json_output(capsys, "tune", *SHAPE, *arguments, code=code)


def names(found):
    return [row["backend"] for row in found["order"]]


def test_what_is_measured_is_gone_by(file, capsys, times):
    times |= dict(reference=1e-9, sdpa=2e-9, native=3e-9)
    assert select(PROBLEM).name == "native"
    found = report(capsys, "--seqs", "32,64")
    assert [(p["seq"], p["requires_grad"]) for p in found["problems"]] == [(32, False), (32, True), (64, False), (64, True)]
    assert [names(p) for p in found["problems"]] == [["reference", "sdpa", "native"]] * 4
    for seq, requires_grad in ((32, False), (60, True)):
        decided = explain(replace(PROBLEM, seq=seq, requires_grad=requires_grad))
        assert decided.picked == "reference"
        assert "measured by `dilkit tune`: reference" in str(decided)
    assert select(replace(PROBLEM, seq=256)).name == "native"
    assert len(tuned_file.load(file)) == 4


def test_what_is_wrong_or_refused_is_not_in_the_order_and_a_table_says_so(file, capsys, monkeypatch):
    unable = Fake("unable", 0, Limits(dtypes=frozenset()))
    with registered(Doubles(name="wrong")), registered(unable):
        assert run("--seq", "32", "--backend", "unable") == 1
        assert "no backend was measured" in capsys.readouterr().out
        assert not file.exists()
        found = report(capsys, "--seq", "32", "--passes", "forward", "--backend", "native,wrong", code=1)
        monkeypatch.setattr(tune, "backend_names", lambda: ("reference",))
        assert run("--seq", "32", "--passes", "training", "--backend", "sdpa,unable") == 0
    (measured,) = found["problems"]
    assert names(measured) == ["native"]
    (left,) = measured["left_out"]
    assert (left["backend"], left["verdict"], bool(left["reasons"])) == ("wrong", "wrong", True)
    printed = capsys.readouterr().out
    assert "1 x 32 tokens, 4 heads x 8, float32, requires_grad, Pattern([16, 32], [1, 2])\n" in printed
    assert "unable refused dtype float32: computes" in " ".join(printed.split())
    assert f"the automatic choice goes by {file}" in printed
    assert "DILKIT_BACKEND=reference is set, and wins over what was measured" in printed


def test_further_runs_add_to_the_file_and_replace_what_they_measure_again(file, capsys, times):
    forward = ("--seq", "32", "--passes", "forward")
    times |= dict(native=1e-9)
    report(capsys, *forward)
    times |= dict(sdpa=1e-10)
    report(capsys, *forward)
    report(capsys, *forward, "--causal")
    first, second = tuned_file.load(file)
    assert (first.shape.is_causal, second.shape.is_causal) == (False, True)
    assert first.seconds[0] == ("sdpa", 1e-10)
    assert [path.name for path in file.parent.iterdir()] == ["tuned.json"]


def test_entries_of_other_setups_are_kept_and_a_file_that_cannot_be_read_is_written_anew(file, capsys):
    gpu = tuned_file.TunedEntry(tuned.setup_of(Device.assume("sm_90")), tuned.shape_of(PROBLEM), (("sdpa", 0.1),))
    file.parent.mkdir()
    file.write_text(tuned_file.to_text([gpu]))
    forward = ("--seq", "32", "--passes", "forward", "--backend", "native")
    assert run(*forward) == 0
    kept, new = tuned_file.load(file)
    assert (kept, [name for name, _ in new.seconds]) == (gpu, ["native"])
    file.write_text("{")
    assert run(*forward) == 0
    assert f"{file}: JSONDecodeError" in capsys.readouterr().err
    assert len(tuned_file.load(file)) == 1


class Sized(Reference):
    launcher: Any = None

    def forward(self, *inputs):
        out, lse = super().forward(*inputs)
        chosen = getattr(self.launcher, "chosen", None)
        return out * (2 if chosen and chosen.columns == 32 else 1), lse


def test_the_fastest_right_sizes_of_tritons_kernels_are_kept(file, capsys, times):
    need_triton()
    slow, fast, wrong = (f"{rows} x {columns}, 8 warps, 1 stages" for rows, columns in ((32, 16), (16, 16), (32, 32)))
    times |= {f"triton: forward {name}".replace(",", ""): seconds for name, seconds in ((fast, 1e-9), (slow, 2e-9))}
    with registered(Sized(name="triton")):
        found = report(capsys, "--seq", "32", "--backend", "triton", "--sizes", "9", "--passes", "forward")
    (kernel,) = found["kernels"]
    assert names(kernel)[:2] == [fast, slow]
    assert wrong in [left["backend"] for left in kernel["left_out"] if left["verdict"] == "wrong"]
    order, sizes = tuned_file.load(file)
    assert (order.seconds[0][0], sizes.seconds[0], sizes.shape.role) == ("triton", (fast, 1e-9), "forward")
    assert f"forward of {sizes.shape.backend}, float32 x 8  {fast}" in " ".join(output(capsys, "tune", "--show").split("\n"))


@pytest.mark.parametrize("device", ["sm_80", "sm_90", "sm_120", "gfx942"])
@pytest.mark.parametrize("role", TUNED_ROLES)
def test_sizes_that_are_counted_to_fit_come_after_the_tables(device, role):
    facts = dict(seq=8192, heads=4, head_dim=128, dtype="bfloat16", device=Device.assume(device))
    for pattern, tall in ((Pattern([4096, 8192], [1, 2]), True), (Pattern([64], [1]), False)):
        problem = Problem(pattern=pattern, **facts)
        first, *others = candidates(role, problem)
        fit = [fits(role, one, problem) for one in others]
        assert first == DeviceLauncher().sizes(role, problem, low=not tall)
        assert fit == sorted(fit, reverse=True)
        assert (max(one.rows for one in others) > LOW_ROWS) == tall
        assert len({first, *others}) == 1 + len(others) >= 4
    assert not fits(role, Sizes(128, 128, 4, 5), problem)


def test_without_a_gpu_no_sizes_are_tried(file, capsys):
    assert run("--seq", "32", "--backend", "triton,native") == 0
    printed = capsys.readouterr().out
    assert "other sizes of Triton's kernels\n" in printed
    assert "device cpu: runs on cuda, hip\n" in printed


def test_interruption_keeps_what_was_measured(file, capsys, monkeypatch):
    interrupt_beyond(32, monkeypatch)
    found = report(capsys, "--seqs", "32,64", "--passes", "forward", "--backend", "native", code=130)
    assert found["interrupted"] is True
    assert len(tuned_file.load(file)) == 1


def test_what_was_measured_is_shown(file, capsys, monkeypatch):
    here = tuned.setup_of(PROBLEM.device)
    old = replace(here, torch="1.0")
    seconds = (("native", 0.001), ("sdpa", 0.002))
    entries = [tuned_file.TunedEntry(setup, tuned.shape_of(PROBLEM), seconds) for setup in (here, old)]
    file.parent.mkdir()
    file.write_text(tuned_file.to_text(entries))
    monkeypatch.setattr(CaseRunner, "run", None)
    text = output(capsys, "tune", "--show")
    assert f"{file}: 2 orders" in text
    assert f"\n{here}\n" in text
    assert f"\n{old} (does not hold here)\n" in text
    assert "  32 tokens, 16/1 32/2, float32 x 8  native 1 ms, sdpa 2 ms" in text
    shown = json_output(capsys, "tune", "--show")["entries"]
    assert [row["holds"] for row in shown] == [True, False]
    assert shown[0]["seconds"] == dict(seconds)
    file.unlink()
    assert f"{file}: no orders" in output(capsys, "tune", "--show")
    file.write_text("[]")
    assert cli.main(["tune", "--show"]) == 2
    assert f"{file}: no object with schema 1" in capsys.readouterr().err
