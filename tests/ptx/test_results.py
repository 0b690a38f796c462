"""Stored trials."""

from dataclasses import replace

import pytest
from ptx.run import brought_up_to_date, is_known, read, write
from ptx.trials import SINGLE, Outcome

from dilkit.device import probe
from dilkit.tools.bench.suites import ptx as report
from dilkit.tools.results.file import new_result
from dilkit.tools.results.rows import ResultRow, RowsResult

TRIALS = SINGLE[:3]
FIRST, SECOND, THIRD = TRIALS
OWN = report.digest("cupy_raw")
DATED = dict(source=OWN, date="2026-01-02T03:04:05+00:00")
CASE = dict(listed="list", architecture="sm_80", rounded=False)
CAME = DATED | dict(trials=9, seconds=90.0, passed=["a", "b"], refused=["c"], wrong=[])
NOTICED = DATED | dict(machine="", seconds=60.0, caught=7, explained=2, lives=[])
ROW = ResultRow(table=report.TRIALS, case=CASE, who="cupy_raw", values=CAME)
BROKEN = ResultRow(table=report.FAULTS, case=dict(kernel="mma_forward"), who="cupy_raw", values=NOTICED)


def outcome(number: int, reason: str = "", skipped: str = "") -> Outcome:
    return Outcome(TRIALS[number], 5, reason, 1.0, 30.0, skipped)


def test_what_was_run_is_not_run_again_but_what_was_wrong(tmp_path):
    rows = brought_up_to_date([], TRIALS, [outcome(0), outcome(1, reason="off")])
    [row] = rows
    assert (row.values["trials"], report.ended(row), row.values["seconds"], row.values["source"]) == (3, 2, 60.0, OWN)
    assert row.values["wrong"] == [f"{SECOND.case_name}: --seed 5: off"]
    write(tmp_path / "ptx.json", rows, [])
    known, _ = read(tmp_path / "ptx.json")
    assert [is_known(trial, known) for trial in TRIALS] == [True, False, False]
    [row] = brought_up_to_date(known, TRIALS, [outcome(1), outcome(2, skipped="refused")])
    passed = sorted((FIRST.case_name, SECOND.case_name))
    assert [row.values[kind] for kind in ("passed", "refused", "wrong")] == [passed, [THIRD.case_name], []]
    [row] = brought_up_to_date([row], TRIALS[1:], [])
    assert (row.values["trials"], row.values["passed"]) == (2, [SECOND.case_name]), "what is no longer listed is dropped"
    text = (tmp_path / "ptx.json").read_text()
    (tmp_path / "ptx.json").write_text(text.replace(OWN, "0" * len(OWN)))
    assert read(tmp_path / "ptx.json") == ([], []), "of kernels that have changed nothing is known"


def test_what_was_run_of_the_kernels_of_today_is_counted_by_kind_of_gpu():
    def result(*rows):
        return new_result(RowsResult, probe("cpu"), kind="ptx", rows=rows)

    few = CAME | dict(trials=4, passed=["a"], refused=[], wrong=["b: off"])
    rounded = replace(ROW, case=CASE | dict(rounded=True), values=few)
    shown = report.REPORT.document(result(ROW, rounded, BROKEN))
    assert shown.tables[0].rows == (("cupy_raw", "sm_80", "2 of 9", "2 of 4", "1", "1"),)
    assert report.REPORT.sentence(result(ROW, rounded)).endswith("; 1 are WRONG.")
    assert "none is wrong. Of 9 faults put into it 7 were caught and 2 are" in report.REPORT.sentence(result(ROW, BROKEN))
    assert "1 were NOT CAUGHT" in report.REPORT.sentence(result(replace(BROKEN, values=NOTICED | dict(lives=["x"]))))
    old = dict(source="0" * report.DIGITS)
    shown = report.REPORT.document(result(replace(ROW, values=few | old), replace(BROKEN, values=NOTICED | old)))
    assert [table.rows for table in shown.tables] == [(("cupy_raw", "sm_80", "0 of 4", "", "0", "0"),)]


@pytest.mark.parametrize(
    ("files", "alike", "other"),
    [
        ({"a.cu": "int x; /* so */\n"}, {"b.cu": "int  x;\n/* and\nso */"}, {"a.cu": "int y;"}),
        (
            {"a.py": "import b\nx = 1  # so\ndef f():\n    return b.y"},
            {"a.py": 'def f():\n    """So."""\n    return (\n        b.y)\n', "c.py": '"""And so."""\nfrom d import b\nx = 1\n'},
            {"a.py": "import b\nx = 1\ndef f():\n    return b.z"},
        ),
    ],
)
def test_a_digest_is_of_code_wherever_it_is(files, alike, other, tmp_path):
    def digest_of(files):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        return report.code_digest(tmp_path / name for name in files)

    assert digest_of(files) == digest_of(alike) != digest_of(other)
    assert report.code_digest([], "more") != report.code_digest([])


def test_every_backend_has_sources():
    nothing = report.code_digest([])
    assert len({nothing, *map(report.digest, report.SOURCES)}) == 1 + len(report.SOURCES)
