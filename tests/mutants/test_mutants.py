"""Every mutant still fits the product, and every package has some; `run.py` tries them."""

from __future__ import annotations

import re

import pytest
from helpers.project import ROOT
from mutants.every import MUTANTS
from mutants.mutant import Mutant
from mutants.place import extension_of
from mutants.run import KILLED, LIVES, Outcome, missing, table, verdict

PLACES = (
    *("dilkit/_", "dilkit/checks", "dilkit/pattern", "dilkit/op", "dilkit/nn", "dilkit/decoding", "dilkit/orders"),
    *(
        "dilkit/selection",
        "dilkit/testing",
        *(f"dilkit/integrations/{name}" for name in ("transformers", "torchscale", "gigapath")),
    ),
    *("backends/native/kernels", "backends/native/b", "backends/reference", "backends/cuda/kernels"),
    *(f"backends/{name}/" for name in ("sdpa", "tiles", "cuda", "triton", "numba")),
    *(f"comm/{name}" for name in ("plan", "passes", "transports", "launch", "packed", "reorder", "shards")),
    *(f"tools/{name}" for name in ("results", "report", "bench", "demo", "commands", "console", "measure")),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.breaks)
def test_a_mutant_fits(mutant: Mutant) -> None:
    assert mutant.applied_in(ROOT)
    assert mutant.needs in ("", "g++", "transformers", "triton", "cupy", "numba")
    for test in mutant.tests.split():
        file, *names = test.split("::")
        text = (ROOT / file).read_text()
        assert all(
            re.search(rf"^{'    ' * depth}(def|class) {name}\b", text, re.MULTILINE) for depth, name in enumerate(names)
        ), test


def test_there_are_enough_of_every_kind_and_everywhere() -> None:
    assert len(MUTANTS) >= 60
    assert len({mutant.breaks for mutant in MUTANTS}) == len({(mutant.file, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
    assert [place for place in PLACES if not any(mutant.file.startswith(place) for mutant in MUTANTS)] == []
    assert {".py", ".pyx", ".h", ".cu"} <= {f".{mutant.file.rpartition('.')[2]}" for mutant in MUTANTS}
    assert sum(bool(mutant.needs) for mutant in MUTANTS) <= 10, "most are tried everywhere"


def test_a_file_belongs_to_its_extension() -> None:
    assert extension_of("backends/native/kernels/dropout.h") == "dilkit.backends.native._native"
    assert extension_of("dilkit/orders/_points.pyx") == "dilkit.orders._points"


def test_a_mutant_that_fits_no_more_is_told() -> None:
    mutant = Mutant("nothing", "file.py", "a = 1", "a = 2", "tests")
    assert mutant.applied("a = 1\nb = 1\n") == "a = 2\nb = 1\n"
    for text in ("a = 3\n", "a = 1\na = 1\n"):
        with pytest.raises(ValueError, match=r"file.py holds 'a = 1' [02] times"):
            mutant.applied(text)


def test_only_a_test_that_failed_has_noticed() -> None:
    assert [verdict(code) for code in (1, 2, -11)] == [KILLED] * 3
    assert [verdict(code) for code in (0, 3, 4, 5)] == [LIVES] * 4
    shown = table([Outcome(MUTANTS[0], KILLED, 1.25), Outcome(MUTANTS[1], LIVES, 2.0)])
    assert f"LIVES: {MUTANTS[1].file}: {MUTANTS[1].tests}" in shown
    assert shown.endswith("1 killed, 1 LIVES")
    assert missing("") == ""
