"""`dilkit bench`: the result file, the checks before timing, the baselines, the report, and the command itself."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from dilkit import Pattern, Problem
from dilkit.oracle import oracle_attention
from dilkit.tools import cli
from dilkit.tools.commands.bench import SEQS
from dilkit.tools.console.text import error_line
from dilkit.tools.measure import ceilings, correctness, memory, overhead
from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.measure.case import CaseRunner, _work, with_speed
from dilkit.tools.measure.implementation import Implementation, Inputs, backend_implementations
from dilkit.tools.report.kinds import bench_plot, bench_report
from dilkit.tools.results import untyped as results
from dilkit.tools.results.decode import encode
from dilkit.tools.results.environment import git_state
from dilkit.tools.results.kinds.bench import BenchCase
from dilkit.tools.results.record import Entry, Samples
from dilkit.tools.results.untyped import ResultError
from dilkit.tools.verify.poison import poisoned_memory

SMALL = Problem(pattern=Pattern([32, 64], [1, 2]), seq=64, heads=4, head_dim=8, requires_grad=True)
TINY_ARGUMENTS = ["--heads", "4", "--dim", "8", "--segments", "16,32", "--rates", "1,2", "--repeats", "2"]


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> Iterator[None]:
    monkeypatch.setitem(ceilings.MATMUL_SIZE, "cpu", 64)
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(ceilings, "ROUNDS", 1 << 10)
    with overhead.one_thread():  # on problems this small, threads only wait for each other
        yield


def bench(tmp_path, *arguments: str) -> int:
    return cli.main(["bench", *TINY_ARGUMENTS, "--out", str(tmp_path), *arguments])


def wrong_by(error: float, what: str = "wrong") -> Implementation:
    right = backend_implementations(["reference"])[0]

    def attend(inputs: Inputs, problem: Problem) -> torch.Tensor:
        return right.attend(inputs, problem) + error

    return replace(right, name=what, attend=attend)


# The result file


def test_a_result_says_what_its_figures_depend_on(tmp_path) -> None:
    path = tmp_path / "new" / "result.json"
    results.save(results.new("bench", SMALL.device, problem=results.describe_problem(SMALL)), path)
    found = results.load(path, "bench", needs=("problem",))
    assert found["schema"] == 1
    assert {"cpu", "cores", "threads", "python", "torch", "numpy", "dilkit", "git_revision", "git_dirty"} <= set(
        found["environment"]
    )
    assert found["environment"]["threads"] == torch.get_num_threads()
    assert found["problem"]["pattern"]["segment_lengths"] == [32, 64]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"schema": 1, "kind": "ben', "truncated"),
        ("", "truncated"),
        ("[1, 2]", "no result of dilkit"),
        ('{"name": "other"}', "no result of dilkit"),
        ('{"schema": 99, "kind": "bench"}', "schema 99"),
        ('{"schema": 1, "kind": "demo"}', "kind 'demo'"),
        ('{"schema": 1, "kind": "bench", "command": "", "date": ""}', "environment, lengths missing"),
    ],
)
def test_a_file_that_is_no_result_is_refused_by_name(tmp_path, text, complaint) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ResultError, match=complaint) as raised:
        results.load(path, "bench", needs=("lengths",))
    assert str(path) in str(raised.value)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path) -> None:
    path = tmp_path / "bench.json"
    results.save({"schema": 1}, path)
    with pytest.raises(ValueError, match="JSON"):
        results.save({"schema": math.nan}, path)
    with pytest.raises(UnicodeEncodeError):
        results.write_text(path, "half a file \ud800")
    assert json.loads(path.read_text()) == {"schema": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_outside_a_checkout_there_is_no_revision(tmp_path) -> None:
    assert git_state(tmp_path) == (None, None)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_checkout_is_dirty_by_its_code_alone(tmp_path) -> None:
    def git(*command: str) -> str:
        names = [f"{role}_{what}=somebody" for role in ("GIT_AUTHOR", "GIT_COMMITTER") for what in ("NAME", "EMAIL")]
        env = {**os.environ, **dict(name.split("=") for name in names)}
        return subprocess.run(["git", *command], cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout.strip()

    files = [tmp_path / name for name in ("docs/results/cpu.json", "README.md", "tools/new.py")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("before")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    for file, dirty in zip(files, [False, False, True], strict=True):
        file.write_text("after")
        assert git_state(tmp_path) == (git("rev-parse", "HEAD"), dirty)


# The checks before timing


@pytest.mark.parametrize("name", ["reference", "gather", "dense"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_contestants_pass_their_checks(name, dtype, is_causal) -> None:
    contestant = BASELINES[name] if name in BASELINES else backend_implementations([name])[0]
    problem = replace(SMALL, dtype=dtype, is_causal=is_causal)
    findings = correctness.check(contestant, problem, Inputs.random(problem))
    assert [f.what for f in findings] == ["out", "dquery", "dkey", "dvalue", "out rows", "dquery rows"]
    assert [f for f in findings if not f.passed] == []


@pytest.mark.parametrize("error", [1e-4, math.nan])
def test_wrong_values_are_found_at_both_lengths(error) -> None:
    findings = correctness.check(wrong_by(error), SMALL, Inputs.random(SMALL))
    assert [f.what for f in findings if not f.passed] == ["out", "out rows"]


@pytest.mark.parametrize("options", [dict(kv_heads=2), dict(key_padding_mask=True), dict(key_padding_mask=True, is_causal=True)])
def test_rows_are_computed_as_the_oracle_does(options) -> None:
    problem = replace(SMALL, pattern=Pattern([16, 32], [2, 4]), dtype="float64", batch=2, **options)
    inputs, rows = Inputs.random(problem), torch.tensor([0, 3, 31, 63])
    flags = dict(is_causal=problem.is_causal, key_padding_mask=inputs.key_padding_mask)
    out, _ = oracle_attention(inputs.query, inputs.key, inputs.value, problem.pattern, **flags)
    (dquery,) = torch.autograd.grad(out, inputs.query, inputs.dout)
    found = correctness.exact_rows(inputs, problem, problem.pattern, rows, "float64")
    torch.testing.assert_close(found, (out[:, rows].detach(), dquery[:, rows]), rtol=1e-12, atol=1e-12)


def test_a_long_problem_is_shortened_with_its_segments() -> None:
    short = correctness.shortened(replace(SMALL, seq=16384, pattern=Pattern([2048, 16384, 10**9], [1, 8, 200])))
    assert (short.seq, short.pattern.segment_lengths, short.pattern.dilation_rates) == (512, (64, 512, 1600), (1, 8, 200))
    assert correctness.shortened(replace(SMALL, seq=1 << 20, pattern=Pattern([4, 512], [1, 2]))).pattern.segment_lengths == (
        4,
        16,
    )
    assert correctness.shortened(SMALL) == SMALL


# The baselines


@pytest.mark.parametrize("offset", ["modulo", "block"])
@pytest.mark.parametrize("pattern", [([16, 32, 64], [1, 2, 4]), ([32], [4]), ([64], [1])])
def test_gather_computes_the_pattern_with_exact_gradients(pattern, offset) -> None:
    problem = replace(SMALL, pattern=Pattern(*pattern, offset=offset), batch=2, dtype="float64")
    assert BASELINES["gather"].refusals(problem) == ()
    assert [f for f in correctness.check_whole(BASELINES["gather"], problem) if not f.passed] == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(seq=65), "seq 65: must be a multiple"),
        (dict(pattern=Pattern([32], [3])), "dilation rate 3"),
        (dict(kv_heads=2), "grouped heads"),
        (dict(key_padding_mask=True), "key_padding_mask"),
        (dict(pattern=Pattern([32], [1], overlap="once")), "once"),
        (dict(pattern=Pattern([32], [1], heads=[(0, 2)])), "head ranges"),
    ],
)
def test_gather_refuses_what_it_cannot_do(change, reason) -> None:
    assert any(reason in told for told in BASELINES["gather"].refusals(replace(SMALL, **change)))


def test_dense_counts_its_own_flops() -> None:
    assert BASELINES["dense"].flops(SMALL) == 3.5 * Pattern.dense().flops(64, 4, 8)
    assert backend_implementations(["reference"])[0].flops(SMALL) == 3.5 * SMALL.flops()


# One length


def test_every_contestant_has_an_entry_that_says_what_became_of_it() -> None:
    def broken(inputs: Inputs, problem: Problem) -> torch.Tensor:
        raise RuntimeError("out of order")

    contestants = [
        backend_implementations(["reference"])[0],
        wrong_by(1.0),
        replace(wrong_by(0.0), name="broken", attend=broken),
        replace(wrong_by(0.0), name="refusing", refusals=lambda problem: ("not today",)),
    ]
    entries = CaseRunner(contestants, repeats=2).run(SMALL).entries
    assert {name: e.verdict for name, e in entries.items()} == {
        "reference": "measured",
        "wrong": "wrong",
        "broken": "failed",
        "refusing": "refused",
    }
    assert entries["broken"].reasons == ("RuntimeError: out of order",)
    assert "allowed" in entries["wrong"].reasons[0]
    assert len(entries["reference"].seconds) == 2
    assert all(check.passed for check in entries["reference"].check)


def test_a_call_that_would_take_too_long_is_left_out_and_says_so() -> None:
    told = CaseRunner(backend_implementations(["reference"]), repeats=1, budget=1e-9).run(SMALL).entries["reference"]
    assert told.verdict == "skipped"
    assert "--budget" in told.reasons[0]


def test_the_next_length_is_expected_from_the_last_one() -> None:
    dense = BASELINES["dense"]
    runner = CaseRunner([dense], last={"dense": (_work(dense, replace(SMALL, seq=64)), 0.5)})
    assert runner._expected_seconds(dense, replace(SMALL, seq=256)) == pytest.approx(8.0)
    assert runner._expected_seconds(dense, replace(SMALL, seq=64, batch=3 * SMALL.batch)) == pytest.approx(1.5)


def test_memory_that_cannot_be_measured_is_none_and_says_why(monkeypatch) -> None:
    def unable(*_) -> int:
        raise memory.MeasureError("no such counter")

    monkeypatch.setattr(memory, "peak_memory", unable)
    entry = CaseRunner(backend_implementations(["reference"]), repeats=1).run(SMALL).entries["reference"]
    assert (entry.peak_bytes, entry.kb_per_token, entry.memory_note) == (None, None, "no such counter")


def test_poisoned_memory_may_be_a_leaf() -> None:
    with poisoned_memory():
        x = torch.empty(3, requires_grad=True)
        assert torch.empty(3, dtype=torch.int64).dtype == torch.int64
    assert x.isnan().all()
    assert x.requires_grad
    assert x.is_leaf


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "ValueError: "),
        ("one\ntwo", "ValueError: one"),
        ("\n raised:\n\n  because\nmore", "ValueError: raised: because"),
        ("raised:", "ValueError: raised:"),
    ],
)
def test_an_error_in_a_line_says_what_it_was(text, line) -> None:
    assert error_line(ValueError(text)) == line


def test_figures_follow_from_the_median() -> None:
    found = with_speed(Entry(), Samples.of((1e-3, 2e-3, 3e-3)), flops=3e9, tokens=64, matmul_gflops=3000.0)
    assert found.gflops == pytest.approx(1500.0)
    assert found.matmul_fraction == pytest.approx(0.5)
    assert found.tokens_per_s == pytest.approx(64 / 2e-3)


# The report


def made_up(backward: bool = True) -> dict:
    """A result of two contestants, "linear" and "square", over three lengths."""

    def entry(seq: int, power: int) -> dict:
        time = encode(Samples.of((1e-6 * seq**power,) * 3))
        figures = dict(time=time, flops=float(seq**power), gflops=12.3, matmul_fraction=0.5, tokens_per_s=1e6)
        return dict(
            verdict="measured", reasons=[], peak_bytes=4096 * seq, forward_peak_bytes=2048 * seq, kb_per_token=4.1, **figures
        )

    lengths = [
        dict(seq=n, output_bytes=1024 * n, entries={"linear": entry(n, 1), "square": entry(n, 2)}, matmul={})
        for n in (512, 1024, 2048)
    ]
    lengths[-1]["entries"]["square"] = dict(verdict="skipped", reasons=["one call would take too long"])
    problem = results.describe_problem(replace(SMALL, requires_grad=backward))
    method = dict(repeats=3, min_time_s=0.0, budget_s=20.0)
    return results.new("bench", SMALL.device, problem=problem, method=method, lengths=lengths, interrupted=False)


def test_the_exponent_is_the_slope_in_log_log() -> None:
    assert bench_report.exponent([1, 2, 4, 8], [5.0, 20.0, 80.0, 320.0]) == pytest.approx(2.0)
    assert bench_report.exponent([10, 1000], [7.0, 7.0]) == pytest.approx(0.0)
    with pytest.raises(ValueError, match="two different sizes"):
        bench_report.exponent([4, 4], [1.0, 2.0])


def test_scaling_is_fitted_for_who_was_measured_twice() -> None:
    fits = bench_report.scaling(made_up()["lengths"])
    assert fits["linear"] == pytest.approx(dict(exponent=1.0, flops_exponent=1.0, lengths=3))
    assert fits["square"] == pytest.approx(dict(exponent=2.0, flops_exponent=2.0, lengths=2))
    assert bench_report.scaling(made_up()["lengths"][:1]) == {}


def test_markdown_is_a_pure_function_of_the_file(tmp_path) -> None:
    result = made_up()
    results.save(result, tmp_path / "r.json")
    page = bench_report.markdown(results.load(tmp_path / "r.json"))
    assert page == bench_report.markdown(result)
    assert "| 1,024 | linear | 1.02 ms | 1.02 ms - 1.02 ms | 12.3 | 50% | 1,000,000 | 4.10 | 4 MiB | 4.0 | 2 MiB | 2.0 |" in page
    assert "square skipped: one call would take too long (at 2,048 tokens)" in page
    assert "linear: time ~ tokens^1.00" in page


def test_a_disturbed_run_is_told_apart_from_a_fast_one() -> None:
    result = made_up()
    assert "quiet machine" not in bench_report.text_table(result)
    result["lengths"][0]["entries"]["linear"]["matmul_fraction"] = 7.6
    assert "quiet machine" in bench_report.text_table(result)


def test_memory_columns_of_the_forward_pass_are_there_only_beside_a_backward() -> None:
    assert "of forward" in bench_report.text_table(made_up(backward=True))
    assert "of forward" not in bench_report.text_table(made_up(backward=False))


def test_the_picture_is_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    bench_plot.draw(made_up(), tmp_path / "b.png")
    nothing = made_up()
    nothing["lengths"] = []
    bench_plot.draw(nothing, tmp_path / "n.png")
    assert (tmp_path / "b.png").read_bytes()[:4] == b"\x89PNG"


def test_ticks_are_as_fine_as_is_readable() -> None:
    assert bench_plot.ticks(bench_plot.TIME.steps, 0.009, 0.11) == pytest.approx([0.01, 0.02, 0.05, 0.1])
    assert bench_plot.ticks(bench_plot.TIME.steps, 1e-5, 1.5) == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1])


# The command


def test_the_command_writes_and_prints_one_result(tmp_path, capsys) -> None:
    assert bench(tmp_path, "--seqs", "64,32", "--backend", "reference", "--baseline", "gather,dense", "--backward", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == results.load(tmp_path / "bench.json", "bench")
    assert [length["seq"] for length in printed["lengths"]] == [32, 64]
    assert set(printed["scaling"]) == {"reference", "gather", "dense"}
    assert (tmp_path / "bench.md").read_text() == bench_report.markdown(printed)


def test_the_command_prints_a_table(tmp_path, capsys) -> None:
    assert bench(tmp_path, "--seq", "48", "--backend", "reference", "--baseline", "gather") == 0
    printed = capsys.readouterr().out
    assert "reference" in printed
    assert "gather refused: seq 48: must be a multiple of segment length 32" in printed


def test_a_wrong_contestant_makes_the_exit_code_1(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(BASELINES, "gather", wrong_by(1.0, "gather"))
    assert bench(tmp_path, "--seq", "32", "--backend", "reference", "--baseline", "gather") == 1
    assert "gather wrong: out" in capsys.readouterr().out


def test_interruption_keeps_what_was_measured(tmp_path, capsys, monkeypatch) -> None:
    whole = CaseRunner.run

    def interrupted(self: CaseRunner, problem: Problem) -> BenchCase:
        if problem.seq > 32:
            raise KeyboardInterrupt
        return whole(self, problem)

    monkeypatch.setattr(CaseRunner, "run", interrupted)
    assert bench(tmp_path, "--seqs", "32,64,128", "--backend", "reference") == 130
    kept = results.load(tmp_path / "bench.json", "bench")
    assert [length["seq"] for length in kept["lengths"]] == [32]
    assert kept["interrupted"] is True
    assert "interrupted" in capsys.readouterr().out


def test_interruption_before_any_length_overwrites_nothing(tmp_path, capsys, monkeypatch) -> None:
    def interrupted(self: CaseRunner, problem: Problem) -> BenchCase:
        raise KeyboardInterrupt

    monkeypatch.setattr(CaseRunner, "run", interrupted)
    assert bench(tmp_path, "--seq", "32", "--backend", "reference", "--json") == 130
    printed = capsys.readouterr()
    assert json.loads(printed.out)["lengths"] == []
    assert "nothing is written" in printed.err
    assert not list(tmp_path.iterdir())


def test_the_environment_names_the_backends(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("DILKIT_BACKEND", "reference")
    assert bench(tmp_path, "--seq", "32", "--json") == 0
    assert [who["name"] for who in json.loads(capsys.readouterr().out)["contestants"]] == ["reference"]
    monkeypatch.setenv("DILKIT_BACKEND", "abacus")
    assert bench(tmp_path, "--seq", "32") == 2
    assert "DILKIT_BACKEND='abacus' is not a known backend" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_said_before_measuring(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(CaseRunner, "run", None)
    (tmp_path / "file").touch()
    for option in ([], ["--overhead"]):
        assert bench(tmp_path / "file", "--seq", "32", *option) == 2
        assert "--out: folder" in capsys.readouterr().err


def test_a_missing_matplotlib_is_said_and_not_fatal(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert bench(tmp_path, "--seq", "32", "--backend", "reference") == 0
    assert "no picture" in capsys.readouterr().err
    assert not (tmp_path / "bench.png").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--backend", "nobody"], "--backend: 'nobody' is not known"),
        (["--baseline", "nobody"], "--baseline: 'nobody' is not known; choose from gather, longnet, dense"),
        (["--backend", "reference,"], "--backend: 'reference,' has an empty"),
        (["--seqs", "32,x"], "--seqs"),
        (["--seq", "8", "--seqs", "8,16"], "--seqs: does not go with --seq 8"),
        (["--budget", "0"], "--budget: '0' is not a number of seconds above 0"),
        (["--repeats", "0"], "--repeats"),
        (["--overhead", "--baseline", "dense"], "--baseline: does not go with --overhead"),
        (["--overhead", "--backward"], "--backward: does not go with --overhead"),
        (["--overhead", "--budget", "3"], "--budget: does not go with --overhead"),
        (["--overhead", "--seqs", "8,16"], "one backend at one length"),
    ],
)
def test_malformed_arguments_are_named(tmp_path, capsys, arguments, complaint) -> None:
    assert bench(tmp_path, *arguments) == 2
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_overhead_compares_a_backend_with_itself(tmp_path, capsys) -> None:
    assert bench(tmp_path, "--overhead", "--backend", "reference") == 0
    printed = capsys.readouterr().out
    found = results.load(tmp_path / "overhead.json", "overhead", needs=("backend", "modes"))
    assert found["backend"] == "reference"
    assert list(found["modes"]) == ["forward, no gradients", "forward, gradients recorded", "forward + backward"]
    assert found["environment"]["threads"] == torch.get_num_threads() == 1
    assert "microseconds" in printed


def test_overhead_calls_the_same_computation_both_ways() -> None:
    _, pairs = overhead.call_pairs(SMALL, "reference")
    forward, recorded, both = pairs.values()
    torch.testing.assert_close(forward[0](), forward[1]()[0])
    assert not forward[0]().requires_grad
    assert recorded[0]().requires_grad
    torch.testing.assert_close(both[0](), both[1]())


def test_overhead_is_the_median_difference_within_a_round() -> None:
    assert overhead.overhead(Samples.of((5.0, 105.0, 7.0)), Samples.of((4.0, 103.0, 4.0))) == 2.0


def test_default_lengths_include_the_longest_segment() -> None:
    assert SEQS[-1] == 16384
