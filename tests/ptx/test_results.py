"""What is kept of trials from run to run."""

from __future__ import annotations

from pathlib import Path

from ptx import results
from ptx.results import brought_up_to_date, is_known
from ptx.trials import SINGLE, Outcome

from dilkit.tools.bench.ptx.sources import digest

TRIALS = SINGLE[:3]
FIRST, SECOND, THIRD = TRIALS


def outcome(number: int, reason: str = "", skipped: str = "") -> Outcome:
    return Outcome(TRIALS[number], 5, reason, 1.0, 30.0, skipped)


def test_what_was_run_is_not_run_again_but_what_was_wrong(tmp_path: Path) -> None:
    rows = brought_up_to_date([], TRIALS, [outcome(0), outcome(1, reason="off")])
    [row] = rows
    assert (row.trials, row.run, row.seconds, row.source) == (3, 2, 60.0, digest("cupy_raw"))
    assert row.wrong == (f"{SECOND.case_name}: --seed 5: off",)
    results.write(tmp_path / "ptx.json", rows, [])
    known, _ = results.read(tmp_path / "ptx.json")
    assert [is_known(trial, known) for trial in TRIALS] == [True, False, False]
    [row] = brought_up_to_date(known, TRIALS, [outcome(1), outcome(2, skipped="refused")])
    assert (set(row.passed), row.refused, row.wrong) == ({FIRST.case_name, SECOND.case_name}, (THIRD.case_name,), ())
    assert all(is_known(trial, [row]) for trial in TRIALS)
    assert row.seconds == 120.0


def test_what_is_no_longer_listed_is_dropped() -> None:
    [row] = brought_up_to_date(brought_up_to_date([], TRIALS, [outcome(0), outcome(1)]), TRIALS[1:], [])
    assert (row.trials, row.passed) == (2, (SECOND.case_name,))


def test_of_kernels_that_have_changed_nothing_is_known(tmp_path: Path) -> None:
    results.write(tmp_path / "ptx.json", brought_up_to_date([], TRIALS, [outcome(0)]), [])
    text = (tmp_path / "ptx.json").read_text()
    (tmp_path / "ptx.json").write_text(text.replace(digest("cupy_raw"), "0" * 12))
    assert results.read(tmp_path / "ptx.json") == ([], [])
