"""What is said of the trials of the kernels' PTX, and of which kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dilkit.device import probe
from dilkit.tools.bench.ptx import document, record, sources
from dilkit.tools.results.file import new_result

ROW = record.Executed(
    **dict(backend="cupy_raw", listed="list", architecture="sm_80", rounded=False),
    **dict(trials=9, source=sources.digest("cupy_raw"), date="2026-01-02T03:04:05+00:00", seconds=90.0),
    **dict(passed=("a", "b"), refused=("c",)),
)
BROKEN = record.Broken(
    **dict(kernel="mma_forward", backend="cupy_raw", source=ROW.source, machine="", date=ROW.date),
    **dict(seconds=60.0, caught=7, explained=2),
)


def result(*executed: record.Executed, broken: tuple[record.Broken, ...] = ()) -> record.PTXResult:
    return new_result(record.PTXResult, probe("cpu"), executed=executed, broken=broken)


def test_what_was_run_is_counted_by_kind_of_gpu() -> None:
    rounded = replace(ROW, rounded=True, trials=4, passed=("a",), refused=(), wrong=("b: --seed 0: off",))
    shown = document.document(result(ROW, rounded, broken=(BROKEN,)))
    assert shown.tables[0].rows == (("cupy_raw", "sm_80", "2 of 9", "2 of 4", "1", "1", "3.0", "2026-01-02"),)
    assert shown.tables[1].rows == (("mma_forward", "9", "7", "2", "0", "1.0", "2026-01-02"),)
    said = document.sentence(result(ROW, rounded))
    assert "instruction by instruction: 4 of 13 trials of cupy_raw for 1 kind of GPU, 0 of 0 trials of triton and" in said
    assert said.endswith("; 1 are WRONG.")
    assert "none is wrong. Of 9 faults put into it 7 were caught and 2 are" in document.sentence(result(ROW, broken=(BROKEN,)))
    assert "1 were NOT CAUGHT" in document.sentence(result(broken=(replace(BROKEN, lives=("x",)),)))


def test_of_kernels_that_have_changed_since_nothing_counts() -> None:
    older = replace(ROW, source="0" * sources.DIGITS, wrong=("d: --seed 0: off",))
    shown = document.document(result(older, broken=(replace(BROKEN, source=older.source),)))
    assert [table.rows for table in shown.tables] == [(("cupy_raw", "sm_80", "0 of 9", "", "0", "0", "0.0", ""),)]
    assert "0 of 9" in document.sentence(result(older))
    assert "WRONG" not in document.sentence(result(older))


@pytest.mark.parametrize(
    ("name", "text", "alike", "other"),
    [
        ("a.cu", "int x; /* so */\n", "int  x;\n/* and\nso */", "int y;"),
        ("a.py", "x = 1  # so\n", '"""So,\nand so."""\nx = 1\n', "y = 1\n"),
    ],
)
def test_comments_are_no_part_of_a_kernel(
    name: str, text: str, alike: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "FOLDER", tmp_path)
    monkeypatch.setitem(sources.SOURCES, "mine", ("a.*",))
    digests = []
    for one in (text, alike, other):
        (tmp_path / name).write_text(one)
        sources.digest.cache_clear()
        digests.append(sources.digest("mine"))
    sources.digest.cache_clear()
    assert digests[0] == digests[1] != digests[2]


def test_every_backend_has_its_kernels() -> None:
    assert all(len([*sources.FOLDER.glob(pattern)]) for patterns in sources.SOURCES.values() for pattern in patterns)
    assert len({*map(sources.digest, sources.SOURCES)}) == len(sources.SOURCES)
