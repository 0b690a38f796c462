"""`dilkit bench`."""

import json

import pytest
import torch
from helpers.measuring import interrupt_beyond, wrong_by

from dilkit.tools import cli
from dilkit.tools.bench.one_pattern import REPORT
from dilkit.tools.bench.overhead import overhead_s
from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.measure.case import CaseRunner
from dilkit.tools.report.markdown import document_markdown
from dilkit.tools.results.decode import encode
from dilkit.tools.results.file import read_result
from dilkit.tools.results.rows import ResultRow, RowsResult, cases_of

pytestmark = pytest.mark.usefixtures("tiny_yardsticks")
TINY = ["--heads", "4", "--dim", "8", "--segments", "16,32", "--rates", "1,2", "--repeats", "2"]


def bench(out, *arguments):
    return cli.main(["bench", *TINY, "--out", str(out), *arguments])


def test_the_command_writes_and_prints_one_result(tmp_path, capsys):
    assert bench(tmp_path, "--seqs", "64,32", "--backend", "reference", "--baseline", "gather,dense", "--backward", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    result = read_result(tmp_path / "bench.json", RowsResult, "bench")
    assert printed == encode(result)
    assert [case.case for case in result.cases()] == [dict(length="32 tokens"), dict(length="64 tokens")]
    assert {row.who for row in result.rows if row.samples} >= {"reference", "gather", "dense"}
    assert document_markdown(REPORT.document(result)) in (tmp_path / "bench.md").read_text()
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("without_pictures")
class TestWithoutPictures:
    def test_a_table_is_printed_and_what_is_named_and_not_measured_makes_the_exit_code_1(self, tmp_path, capsys):
        assert bench(tmp_path, "--seq", "48", "--device", "cpu", "--backend", "reference,cupy_raw", "--baseline", "gather") == 1
        printed = capsys.readouterr()
        assert "reference" in printed.out
        assert "gather refused: seq 48: must be a multiple of segment length 32" in printed.out
        assert "no picture" in printed.err
        assert not (tmp_path / "bench.png").exists()

    def test_a_wrong_implementation_makes_the_exit_code_1(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setitem(BASELINES, "gather", wrong_by(1.0, "gather"))
        assert bench(tmp_path, "--seq", "32", "--backend", "reference", "--baseline", "gather") == 1
        assert "gather wrong: out" in capsys.readouterr().out

    def test_interruption_keeps_what_was_measured_and_replaces_nothing_by_nothing(self, tmp_path, capsys, monkeypatch):
        interrupt_beyond(32, monkeypatch)
        assert bench(tmp_path, "--seq", "64", "--backend", "reference", "--json") == 130
        printed = capsys.readouterr()
        assert json.loads(printed.out)["rows"] == []
        assert "nothing is written" in printed.err
        assert not list(tmp_path.iterdir())
        assert bench(tmp_path, "--seqs", "32,64,128", "--backend", "reference") == 130
        kept = read_result(tmp_path / "bench.json", RowsResult, "bench")
        assert [case.case for case in kept.cases()] == [dict(length="32 tokens")]
        assert kept.interrupted
        assert "INTERRUPTED" in capsys.readouterr().out

    @pytest.mark.parametrize("option", [[], ["--overhead"]], ids=["lengths", "overhead"])
    def test_a_folder_that_cannot_be_made_is_said_before_measuring(self, option, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(CaseRunner, "run", None)
        (tmp_path / "file").touch()
        assert bench(tmp_path / "file", "--seq", "32", *option) == 2
        assert "--out: folder" in capsys.readouterr().err

    def test_overhead_compares_a_backend_with_itself(self, tmp_path, capsys):
        assert bench(tmp_path, "--overhead", "--backend", "reference") == 0
        found = read_result(tmp_path / "overhead.json", RowsResult, "overhead")
        assert found.facts["backend"] == "reference"
        modes = "forward, no gradients", "forward, gradients recorded", "forward + backward"
        assert [case.case["mode"] for case in found.cases()] == list(modes)
        assert found.environment.threads == torch.get_num_threads() == 1
        assert "forward, gradients recorded  " in capsys.readouterr().out


def test_overhead_is_the_median_difference_within_a_round():
    samples = dict(dilkit=(5.0, 105.0, 7.0), directly=(4.0, 103.0, 4.0))
    (case,) = cases_of(ResultRow(table="call", who=who, samples=times) for who, times in samples.items())
    assert overhead_s(case) == 2.0
