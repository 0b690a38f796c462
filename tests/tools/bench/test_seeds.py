"""`dilkit bench --suite seeds`."""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from helpers.measuring import shrink

from dilkit.testing import memory
from dilkit.testing.accuracy import Check
from dilkit.testing.tensors import Tensors
from dilkit.tools.bench import run
from dilkit.tools.bench.suite import SuiteStep
from dilkit.tools.bench.suites.seeds import REPORT, SETTINGS, SeedsSuite
from dilkit.tools.measure.ranks_call import RanksCall
from dilkit.tools.results.file import read_result
from dilkit.tools.results.rows import ResultRow, RowsResult

CASES = (SETTINGS["original 1 x 512"], SETTINGS["multi-segment"], SETTINGS["implementations 2048"])
TWO = SETTINGS["ring 2048, 2 ranks"]
TINY = (*CASES, TWO)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    shrink(monkeypatch)
    monkeypatch.setattr(memory, "peak_memory", lambda function, device="cpu": held(function()))


def held(found):
    """Bytes of all tensors in what a call returns: in place of the peak, which takes long to measure."""
    if isinstance(found, torch.Tensor):
        return found.nbytes
    parts = vars(found).values() if isinstance(found, Tensors) else found if isinstance(found, tuple) else ()
    return sum(map(held, parts))


@pytest.mark.slow
def test_the_suite_measures_and_reports_everything(tmp_path):
    suite = SeedsSuite(quick=True, repeats=2, settings=TINY, launcher="threads")
    result = run.measure(suite, {}, tmp_path, resume=False)
    assert not suite.wrong(result)
    assert result == read_result(tmp_path / "suite.json", RowsResult, "suite-seeds")
    cases = result.cases("settings")
    assert (result.done, len(cases)) == (len(list(suite.steps())), len(CASES))
    for case in cases:
        assert case.timed("matmul", "auto")
        assert {row.verdict for row in case.rows.values()} == {"measured"}, case
    assert any(case.timed("reference", "multihead") for case in cases)
    assert any(case.timed("ordered") for case in cases)
    ranks = result.cases("ranks")
    assert [sorted(case.rows) for case in ranks] == [["ranks"], ["one rank", "ranks"]]
    assert all(case.rows["ranks"].checks for case in ranks)
    document = REPORT.document(result)
    tables = {table.title: table for table in document.tables}
    assert len(tables["Every published figure"].rows) == 188


@pytest.mark.parametrize("error", [False, True])
def test_ranks_that_fail_or_are_wrong_decide_on_the_exit_code(error, monkeypatch):
    def check(call):
        if error:
            raise ValueError("out of luck")
        return (Check.of("out", 16, 1.0, 0.1, 0.2),)

    monkeypatch.setattr(RanksCall, "check", check)
    suite = SeedsSuite(quick=True, repeats=2, settings=TINY, launcher="threads")
    rows = next(step for step in suite.steps() if step.table == "ranks").measure()
    assert {(row.who, row.verdict) for row in rows} == {("the job", "failed") if error else ("ranks", "wrong")}
    result = replace(run.begin(suite, [], {}, {}), rows=tuple(rows))
    assert suite.wrong(result)
    assert rows[0].reasons[0] in " ".join(REPORT.document(result).notes)


@dataclass(frozen=True)
class Toy(SeedsSuite):
    launcher: str = "threads"
    error: BaseException | None = None

    def steps(self):
        yield from (SuiteStep("cache", f"step {i}", partial(self.measure, i)) for i in range(5))

    def measure(self, number):
        if number == 2 and self.error is not None:
            raise self.error
        case = CASES[0].case() | dict(seq=number)
        return [ResultRow(table="cache", case=case, who=name, samples=(1.0,)) for name in ("auto", "no cache")]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("out of luck")], ids=["interrupted", "died"])
def test_a_run_goes_on_where_it_ended(error, tmp_path):
    with suppress(ValueError):
        run.measure(Toy(error=error), {}, tmp_path, resume=False)
    begun = read_result(tmp_path / "suite.json", RowsResult, "suite-seeds")
    assert (begun.interrupted, begun.done, len(begun.rows)) == (True, 2, 4)
    result = run.measure(Toy(), {}, tmp_path, resume=True)
    assert (result.interrupted, result.done) == (False, 5)
    assert [case.case["seq"] for case in result.cases("cache")] == [0, 1, 2, 3, 4]
    assert [session["date"] for session in result.earlier] == [begun.date]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (dict(kind="suite-ring"), "a result of kind 'suite-ring'"),
        (dict(steps=[["cases", "another step"]]), "is of another list of steps"),
        (dict(chosen=dict(repeats=9)), "is of another options \\(repeats 9"),
        (dict(device_name="a potato"), "is of another device \\(device_name a potato"),
        (dict(facts=dict(timed="GPU time")), "is of another method \\(timed GPU time, here None"),
        (None, "there is no"),
    ],
    ids=["kind", "steps", "options", "device", "method", "no file"],
)
def test_a_run_does_not_go_on_from_another_one(tmp_path, change, complaint):
    if change is not None:
        run.measure(Toy(), {}, tmp_path, resume=False)
        path = tmp_path / "suite.json"
        found = json.loads(path.read_text())
        found["environment"]["device_name"] = change.pop("device_name", found["environment"]["device_name"])
        path.write_text(json.dumps(found | change))
    with pytest.raises(ValueError, match=complaint):
        run.measure(Toy(), {}, tmp_path, resume=True)
