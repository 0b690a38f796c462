"""`dilkit bench`: what it measures, writes and prints, and what its document says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.measuring import SMALL, wrong_by
from helpers.result_files import FOLDER

from dilkit import Problem
from dilkit.tools import cli
from dilkit.tools.bench.one_pattern.document import document
from dilkit.tools.bench.one_pattern.record import BenchCase, BenchResult, scaling
from dilkit.tools.bench.overhead import cases as overhead
from dilkit.tools.bench.overhead.record import Calls, OverheadResult
from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.measure.case import CaseRunner
from dilkit.tools.report.markdown import document_markdown
from dilkit.tools.results.decode import encode
from dilkit.tools.results.file import read_result
from dilkit.tools.results.record import Entry, Samples

pytestmark = pytest.mark.usefixtures("tiny_yardsticks")
TINY = ["--heads", "4", "--dim", "8", "--segments", "16,32", "--rates", "1,2", "--repeats", "2"]


@pytest.fixture
def pictures() -> None:
    """Of a test that looks at them; the others do without, for they are most of the time."""


@pytest.fixture(autouse=True)
def _without_pictures(request: pytest.FixtureRequest) -> None:
    if "pictures" not in request.fixturenames:
        request.getfixturevalue("without_pictures")


def bench(out: Path, *arguments: str) -> int:
    return cli.main(["bench", *TINY, "--out", str(out), *arguments])


def test_scaling_is_fitted_for_who_was_measured_twice() -> None:
    def entry(work: float) -> Entry:
        return Entry(time=Samples.of([1e-6 * work]), flops=work)

    cases = [BenchCase(seq=n, output_bytes=n, entries=dict(linear=entry(n), square=entry(n**2))) for n in (512, 1024, 2048)]
    cases[-1].entries["square"] = Entry(verdict="skipped")
    linear, square = scaling(cases)["linear"], scaling(cases)["square"]
    assert (linear.exponent, linear.flops_exponent, linear.lengths) == pytest.approx((1.0, 1.0, 3))
    assert (square.exponent, square.flops_exponent, square.lengths) == pytest.approx((2.0, 2.0, 2))
    assert scaling(cases[:1]) == {}


@pytest.mark.parametrize(("fraction", "disturbed"), [(0.5, False), (7.6, True)])
def test_a_disturbed_run_is_not_taken_for_a_fast_one(fraction, disturbed) -> None:
    result = read_result(FOLDER / "lengths.json", BenchResult)
    entries = dict(native=replace(result.lengths[0].entries["native"], matmul_fraction=fraction))
    notes = document(replace(result, lengths=(replace(result.lengths[0], entries=entries),))).notes
    assert any("quiet machine" in note for note in notes) == disturbed


def test_the_command_writes_and_prints_one_result(tmp_path, capsys, pictures) -> None:
    assert bench(tmp_path, "--seqs", "64,32", "--backend", "reference", "--baseline", "gather,dense", "--backward", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    result = read_result(tmp_path / "bench.json", BenchResult)
    assert printed == encode(result)
    assert [case.seq for case in result.lengths] == [32, 64]
    assert set(result.scaling) == {"reference", "gather", "dense"}
    assert document_markdown(document(result)) in (tmp_path / "bench.md").read_text()
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert result.environment.threads == torch.get_num_threads()


def test_the_command_prints_a_table_where_matplotlib_is_missing_too(tmp_path, capsys) -> None:
    assert bench(tmp_path, "--seq", "48", "--backend", "reference", "--baseline", "gather") == 0
    printed = capsys.readouterr()
    assert "reference" in printed.out
    assert "gather refused: seq 48: must be a multiple of segment length 32" in printed.out
    assert "no picture" in printed.err
    assert not (tmp_path / "bench.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("named", "code"), [("reference,cupy_raw", 1), ("cupy_raw", 1), ("reference", 0)])
def test_a_backend_that_is_named_and_not_measured_makes_the_exit_code_1(tmp_path, named, code) -> None:
    assert bench(tmp_path, "--seq", "32", "--device", "cpu", "--backend", named, "--json") == code


def test_a_wrong_implementation_makes_the_exit_code_1(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(BASELINES, "gather", wrong_by(1.0, "gather"))
    assert bench(tmp_path, "--seq", "32", "--backend", "reference", "--baseline", "gather") == 1
    assert "gather wrong: out" in capsys.readouterr().out


def interrupted_beyond(monkeypatch, seq: int) -> None:
    whole = CaseRunner.run

    def run(self: CaseRunner, problem: Problem) -> BenchCase:
        if problem.seq > seq:
            raise KeyboardInterrupt
        return whole(self, problem)

    monkeypatch.setattr(CaseRunner, "run", run)


def test_interruption_keeps_what_was_measured(tmp_path, capsys, monkeypatch) -> None:
    interrupted_beyond(monkeypatch, 32)
    assert bench(tmp_path, "--seqs", "32,64,128", "--backend", "reference") == 130
    kept = read_result(tmp_path / "bench.json", BenchResult)
    assert [case.seq for case in kept.lengths] == [32]
    assert kept.interrupted
    assert "interrupted" in capsys.readouterr().out


def test_interruption_before_any_length_overwrites_nothing(tmp_path, capsys, monkeypatch) -> None:
    interrupted_beyond(monkeypatch, 0)
    assert bench(tmp_path, "--seq", "32", "--backend", "reference", "--json") == 130
    printed = capsys.readouterr()
    assert json.loads(printed.out)["lengths"] == []
    assert "nothing is written" in printed.err
    assert not list(tmp_path.iterdir())


def test_the_environment_names_the_backends(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("DILKIT_BACKEND", "reference")
    assert bench(tmp_path, "--seq", "32", "--json") == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["contestants"]] == ["reference"]
    monkeypatch.setenv("DILKIT_BACKEND", "abacus")
    assert bench(tmp_path, "--seq", "32") == 2
    assert "DILKIT_BACKEND='abacus' is not a known backend" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_said_before_measuring(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(CaseRunner, "run", None)
    (tmp_path / "file").touch()
    for option in ([], ["--overhead"]):
        assert bench(tmp_path / "file", "--seq", "32", *option) == 2
        assert "--out: folder" in capsys.readouterr().err


def test_overhead_compares_a_backend_with_itself(tmp_path, capsys) -> None:
    assert bench(tmp_path, "--overhead", "--backend", "reference") == 0
    printed = capsys.readouterr().out
    found = read_result(tmp_path / "overhead.json", OverheadResult)
    assert found.backend == "reference"
    assert list(found.modes) == ["forward, no gradients", "forward, gradients recorded", "forward + backward"]
    assert found.environment.threads == torch.get_num_threads() == 1
    assert "forward, gradients recorded  " in printed


def test_overhead_calls_the_same_computation_both_ways() -> None:
    _, pairs = overhead.call_pairs(SMALL, "reference")
    forward, recorded, both = pairs.values()
    torch.testing.assert_close(forward[0](), forward[1]()[0])
    assert not forward[0]().requires_grad
    assert recorded[0]().requires_grad
    torch.testing.assert_close(both[0](), both[1]())


def test_overhead_is_the_median_difference_within_a_round() -> None:
    found = Calls.of(Samples.of((5.0, 105.0, 7.0)), Samples.of((4.0, 103.0, 4.0)))
    assert (found.overhead_s, found.overhead_of_fastest_s) == (2.0, 1.0)
