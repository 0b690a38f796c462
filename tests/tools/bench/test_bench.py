"""`dilkit bench`: what it measures, writes and prints, and what its document says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.measuring import wrong_by

from dilkit import Problem
from dilkit.tools import cli
from dilkit.tools.bench.one_pattern.document import document
from dilkit.tools.bench.one_pattern.record import BenchCase, BenchResult, scaling
from dilkit.tools.bench.overhead.record import Calls, OverheadResult
from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.measure.case import CaseRunner
from dilkit.tools.report.markdown import document_markdown
from dilkit.tools.results.decode import encode
from dilkit.tools.results.file import read_result
from dilkit.tools.results.record import Entry, Samples

pytestmark = pytest.mark.usefixtures("tiny_yardsticks")
TINY = ["--heads", "4", "--dim", "8", "--segments", "16,32", "--rates", "1,2", "--repeats", "2"]


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


def test_the_command_writes_and_prints_one_result(tmp_path, capsys) -> None:
    assert bench(tmp_path, "--seqs", "64,32", "--backend", "reference", "--baseline", "gather,dense", "--backward", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    result = read_result(tmp_path / "bench.json", BenchResult)
    assert printed == encode(result)
    assert [case.seq for case in result.lengths] == [32, 64]
    assert set(result.scaling) == {"reference", "gather", "dense"}
    assert document_markdown(document(result)) in (tmp_path / "bench.md").read_text()
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("without_pictures")
class TestWithoutPictures:
    def test_a_table_is_printed_and_what_is_named_and_not_measured_makes_the_exit_code_1(self, tmp_path, capsys) -> None:
        assert bench(tmp_path, "--seq", "48", "--device", "cpu", "--backend", "reference,cupy_raw", "--baseline", "gather") == 1
        printed = capsys.readouterr()
        assert "reference" in printed.out
        assert "gather refused: seq 48: must be a multiple of segment length 32" in printed.out
        assert "no picture" in printed.err
        assert not (tmp_path / "bench.png").exists()

    def test_a_wrong_implementation_makes_the_exit_code_1(self, tmp_path, capsys, monkeypatch) -> None:
        monkeypatch.setitem(BASELINES, "gather", wrong_by(1.0, "gather"))
        assert bench(tmp_path, "--seq", "32", "--backend", "reference", "--baseline", "gather") == 1
        assert "gather wrong: out" in capsys.readouterr().out

    def test_interruption_keeps_what_was_measured_and_replaces_nothing_by_nothing(self, tmp_path, capsys, monkeypatch) -> None:
        whole = CaseRunner.run

        def run(self: CaseRunner, problem: Problem) -> BenchCase:
            if problem.seq > 32:
                raise KeyboardInterrupt
            return whole(self, problem)

        monkeypatch.setattr(CaseRunner, "run", run)
        assert bench(tmp_path, "--seq", "64", "--backend", "reference", "--json") == 130
        printed = capsys.readouterr()
        assert json.loads(printed.out)["lengths"] == []
        assert "nothing is written" in printed.err
        assert not list(tmp_path.iterdir())
        assert bench(tmp_path, "--seqs", "32,64,128", "--backend", "reference") == 130
        kept = read_result(tmp_path / "bench.json", BenchResult)
        assert [case.seq for case in kept.lengths] == [32]
        assert kept.interrupted
        assert "interrupted" in capsys.readouterr().out

    @pytest.mark.parametrize("option", [[], ["--overhead"]], ids=["lengths", "overhead"])
    def test_a_folder_that_cannot_be_made_is_said_before_measuring(self, option, tmp_path, capsys, monkeypatch) -> None:
        monkeypatch.setattr(CaseRunner, "run", None)
        (tmp_path / "file").touch()
        assert bench(tmp_path / "file", "--seq", "32", *option) == 2
        assert "--out: folder" in capsys.readouterr().err

    def test_overhead_compares_a_backend_with_itself(self, tmp_path, capsys) -> None:
        assert bench(tmp_path, "--overhead", "--backend", "reference") == 0
        found = read_result(tmp_path / "overhead.json", OverheadResult)
        assert found.backend == "reference"
        assert list(found.modes) == ["forward, no gradients", "forward, gradients recorded", "forward + backward"]
        assert found.environment.threads == torch.get_num_threads() == 1
        assert "forward, gradients recorded  " in capsys.readouterr().out


def test_overhead_is_the_median_difference_within_a_round() -> None:
    found = Calls.of(Samples.of((5.0, 105.0, 7.0)), Samples.of((4.0, 103.0, 4.0)))
    assert (found.overhead_s, found.overhead_of_fastest_s) == (2.0, 1.0)
