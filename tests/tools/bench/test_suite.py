"""`dilkit bench --suite`: the command at a tiny size, and how figures are judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dilkit.tools import cli
from dilkit.tools.bench import cpu as suite_cpu
from dilkit.tools.bench import untyped_target as suite_targets
from dilkit.tools.bench.untyped_target import Target
from dilkit.tools.measure import ceilings
from dilkit.tools.report import registry
from dilkit.tools.report.kinds import suite_report

TINY = {
    name: (seq, lengths, rates)
    for name, (seq, lengths, rates) in {
        "A": (128, (16, 32, 128), (1, 2, 16)),
        "B": (64, (16, 32), (1, 2)),
        "C": (256, (16, 64, 256), (1, 4, 16)),
        "D": (128, (16, 128), (1, 16)),
        "million": (256, (16, 256), (1, 4)),
    }.items()
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_cpu, "CONFIGURATIONS", TINY)
    monkeypatch.setattr(suite_cpu, "MATMUL", 64)
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(ceilings, "ROUNDS", 1 << 10)
    monkeypatch.setattr(suite_cpu, "QUICK", 1)
    monkeypatch.setattr(suite_cpu, "THREADS", 1)  # on problems this small, threads only wait for each other


def run(out: Path, *arguments: str) -> int:
    return cli.main(["bench", "--suite", "cpu", "--repeats", "1", "--out", str(out), *arguments])


def test_the_suite_measures_and_judges_everything(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(tmp_path, "--quick", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "suite.json").read_text()) == printed
    assert len(printed["cases"]) == 4 * 2 * 2
    for case in printed["cases"]:
        assert {e["verdict"] for e in case["entries"].values()} == {"measured"}, case
        assert all(finding["passed"] for entry in case["entries"].values() for finding in entry["check"])
    assert [figure["name"] for figure in printed["figures"]] == [target.name for target in suite_targets.TARGETS]
    for figure in printed["figures"]:
        assert figure["values"], figure
    assert (tmp_path / "suite.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "suite.md").read_text()
    assert page.count("\n| A | ") == 2 * 2 * 3
    assert "LongNet" in page
    assert suite_report.figures_markdown(printed) in page
    assert "QUICK" in page
    titles = [plot.title for plot in registry.document_of(tmp_path / "suite.json").plots]
    assert {"Speed-up of native over sdpa, with 95% intervals", "Roofline: speed beside the measured matmul"} <= set(titles)


def test_what_was_measured_before_ctrl_c_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(suite_cpu.Suite, "case", interrupt)
    assert run(tmp_path, "--quick") == 130
    kept = json.loads((tmp_path / "suite.json").read_text())
    assert kept["interrupted"]
    assert kept["cases"] == []
    assert len(kept["dtypes"]) == 1
    verdicts = {figure["name"]: figure["verdict"] for figure in kept["figures"]}
    assert verdicts["B: the same"] == "not measured"
    assert "INTERRUPTED" in suite_report.text(kept)


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
    limits = dict(must=1.5, aim=1.0 if lower else 2.0)
    assert Target("figure", **limits, read=lambda _: values, lower=lower).judge({})["verdict"] == verdict


def test_what_a_machine_cannot_show_is_said() -> None:
    target = Target("figure", 1.0, 2.0, lambda _: {"64": 3.0}, missing=lambda _: "no such unit")
    assert target.judge({})["verdict"] == "not measurable here: no such unit"
