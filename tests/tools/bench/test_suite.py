"""`dilkit bench --suite`: the command at a tiny size, and how figures are judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dilkit.tools import cli
from dilkit.tools.bench import cpu as suite
from dilkit.tools.bench.configuration import Configuration
from dilkit.tools.bench.target import Target
from dilkit.tools.report.kinds.cpu import document
from dilkit.tools.results.decode import encode
from dilkit.tools.results.file import read_result
from dilkit.tools.results.kinds.cpu import CpuResult

TINY = {
    "A": Configuration(128, (16, 32, 128), (1, 2, 16)),
    "B": Configuration(64, (16, 32), (1, 2)),
    "C": Configuration(256, (16, 64, 256), (1, 4, 16)),
    "D": Configuration(128, (16, 128), (1, 16)),
    "million": Configuration(256, (16, 256), (1, 4)),
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tiny_yardsticks: None) -> None:
    for name, value in dict(CONFIGURATIONS=TINY, MATMUL=64, THREADS=1).items():
        monkeypatch.setattr(suite, name, value)
    monkeypatch.setattr(suite.CpuSuite, "DIVISOR", 1)


def run(out: Path, *arguments: str) -> int:
    return cli.main(["bench", "--suite", "cpu", "--repeats", "1", "--out", str(out), *arguments])


def test_the_suite_measures_and_judges_everything(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(tmp_path, "--quick", "--json") == 0
    result = read_result(tmp_path / "suite.json", CpuResult)
    assert json.loads(capsys.readouterr().out) == encode(result)
    assert len(result.cases) == 4 * 2 * 2
    for case in result.cases:
        assert {entry.verdict for entry in case.entries.values()} == {"measured"}, case
        assert all(check.passed for entry in case.entries.values() for check in entry.check)
    assert [figure.name for figure in result.figures] == [target.name for target in suite.TARGETS]
    assert all(figure.values for figure in result.figures)
    assert (tmp_path / "suite.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "suite.md").read_text()
    assert page.count("\n| A | ") == 2 * 2 * 3
    assert "QUICK" in page
    titles = {plot.title for plot in document(result).plots}
    assert {"Speed-up of native over sdpa, with 95% intervals", "Roofline: speed beside the measured matmul"} <= titles


def test_what_was_measured_before_ctrl_c_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(suite.CpuSuite, "case", interrupt)
    assert run(tmp_path, "--quick") == 130
    kept = read_result(tmp_path / "suite.json", CpuResult)
    assert kept.interrupted
    assert (len(kept.cases), len(kept.dtypes)) == (0, 1)
    assert {figure.name: figure.verdict for figure in kept.figures}["B: the same"] == "not measured"
    assert "INTERRUPTED" in (tmp_path / "suite.md").read_text()


@pytest.mark.parametrize("option", [("--seq", "64"), ("--backend", "sdpa"), ("--causal",), ("--dtype", "bf16"), ("--overhead",)])
def test_options_that_the_suite_decides_on_are_refused(tmp_path: Path, option: tuple[str, ...], capsys) -> None:
    assert run(tmp_path, *option) == 2
    assert f"{option[0]}: does not go with --suite" in capsys.readouterr().err


def test_quick_goes_with_a_suite_alone(capsys) -> None:
    assert cli.main(["bench", "--quick"]) == 2
    assert "--quick" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "lower", "verdict"),
    [
        ({"64": 2.0, "128": 1.0}, False, "short"),
        ({"64": 2.0, "128": 1.5}, False, "met"),
        ({"64": 2.0, "128": 3.0}, False, "aim met"),
        ({"64": 1.6, "128": 1.9}, True, "short"),
        ({"64": 1.2, "128": 1.5}, True, "met"),
        ({}, False, "not measured"),
    ],
)
def test_the_worst_value_decides(values: dict[str, float], lower: bool, verdict: str) -> None:
    target = Target("figure", 1.5, 1.0 if lower else 2.0, read=lambda _: values, lower=lower)
    assert target.judge(None).verdict == verdict


def test_what_a_machine_cannot_show_is_said() -> None:
    target = Target("figure", 1.0, 2.0, lambda _: {"64": 3.0}, missing=lambda _: "no such unit")
    assert target.judge(None).verdict == "not measurable here: no such unit"
