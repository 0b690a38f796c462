"""Suites of a CPU from end to end at tiny sizes."""

import json
from dataclasses import astuple, replace
from importlib.util import find_spec

import pytest
from helpers.measuring import reference
from helpers.result_files import FOLDER, content
from helpers.small_suites import entries, run

from dilkit import DilatedCache
from dilkit.tools.bench import suites
from dilkit.tools.bench.suites import slides
from dilkit.tools.bench.target import Target
from dilkit.tools.bench.workloads import serving_calls, ways
from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.report import registry
from dilkit.tools.results.decode import encode

pytestmark = pytest.mark.usefixtures("tiny_yardsticks", "without_pictures")

MISSING = "transformers" if find_spec("transformers") is None else "nothing"
BY_SUITE = [
    *suites.SUITES.keys() - {"cpu", "gpu", "preferences", "seeds"},
    "gpu-h200",
    *(path.stem for path in FOLDER.glob("cpu-*.json")),
]


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch):
    """The reference in the stead of FlexAttention, which takes many seconds to compile."""
    monkeypatch.setitem(BASELINES, "flex", reference())


@pytest.mark.parametrize("file", sorted(BY_SUITE))
def test_published_figures_are_what_the_results_hold(file):
    result = registry.read(FOLDER / f"{file}.json")
    published = {figure.name: figure for figure in result.figures}
    for target in suites.suite(result.suite).TARGETS:
        *facts, values, verdict = astuple(target.judge(result))
        assert astuple(published[target.name]) == (*facts, pytest.approx(values, rel=1e-12), verdict)


@pytest.mark.parametrize("name", ["cpu", "patterns", "scores", "serving", "slides"])
def test_a_suite_measures_and_judges_everything(name, tmp_path, capsys):
    code, result = run(name, tmp_path, "--json")
    assert code == 0
    assert json.loads(capsys.readouterr().out) == encode(result)
    for entry in entries(result):
        assert entry.verdict == "measured" or MISSING in entry.reasons[0], entry.reasons
        assert all(check.passed for check in entry.checks)
    assert [figure.name for figure in result.figures] == [target.name for target in suites.suite(name).TARGETS]
    unmeasured = [figure for figure in result.figures if not figure.values and "not measurable" not in figure.verdict]
    noted = [entry for entry in entries(result) if entry.values.get("memory_note")]  # a system may take memory back meanwhile
    unexplained = [figure for figure in unmeasured if MISSING not in figure.name and not (noted and "memory" in figure.name)]
    assert not unexplained
    assert "QUICK" in (tmp_path / "suite.md").read_text()


@pytest.mark.parametrize("name", ["orders", "patterns", "serving", "slides"])
def test_committed_results_are_of_the_sizes_by_default(name):
    earlier = content(name)["steps"]
    assert all([step.table, step.what] in earlier for step in suites.suite(name)().steps())


class Forgetful(DilatedCache):
    def attend(self, query, key, value, **options):
        return super().attend(query, key, value * 0.5, **options)


class Greedy(DilatedCache):
    allocated_nbytes = 1 << 20  # more than it may hold


PUBLISHED = slides.published_embedding


def other(*arguments):
    return PUBLISHED(*arguments) * 1.001


@pytest.mark.parametrize(
    ("name", "place", "what", "instead", "lost"),
    [
        ("patterns", ways, "merged", lambda outs, lses: outs[0], [1]),
        pytest.param("slides", slides, "published_embedding", other, [0, 1], marks=pytest.mark.slow),
        pytest.param("serving", serving_calls, "DilatedCache", Forgetful, [2, 3, 5, 6, 7, 8, 9, 10], marks=pytest.mark.slow),
        ("serving", serving_calls, "DilatedCache", Greedy, []),
    ],
)
def test_what_is_wrong_is_not_timed_and_decides_on_the_exit_code(name, place, what, instead, lost, tmp_path, monkeypatch):
    monkeypatch.setattr(place, what, instead)
    code, result = run(name, tmp_path)
    assert code == 1
    unmeasured = [i for i, one in enumerate(result.figures) if one.verdict == "not measured" and MISSING not in one.name]
    assert unmeasured == lost
    times = {entry.samples for entry in entries(result) if entry.verdict == "wrong"}
    assert times == ({()} if lost else set())


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
def test_the_worst_value_decides(values, lower, verdict):
    target = Target("figure", 1.5, 1.0 if lower else 2.0, read=lambda _: values, lower=lower)
    assert target.judge(None).verdict == verdict
    missing = replace(target, missing=lambda _: "no such unit")
    assert missing.judge(None).verdict == "not measurable here: no such unit"
