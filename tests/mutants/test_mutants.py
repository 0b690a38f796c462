"""Every mutant of C fits the product; faults of Python are found by their syntax; `run.py` tries both."""

import re

import pytest
from helpers.project import ROOT
from mutants.compiled import MUTANTS
from mutants.faults import Fault, _places, drawn

SOURCE = '''\
class Runs:
    limit = 3

    def below(self, end: int = 4) -> int:
        """Count runs."""
        if not end or end < self.limit + 1:
            self.check(end, strict=True)
            raise ValueError(f"{end + 1}")
        return [1 if x else -x for x in "é"][end // 2]
'''


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.breaks)
def test_a_mutant_fits(mutant):
    assert mutant.applied_in(ROOT)
    for test in mutant.tests.split():
        file, *names = test.split("::")
        assert all(re.search(rf"^def {name}\b", (ROOT / file).read_text(), re.MULTILINE) for name in names), test


def test_faults_of_python_are_in_the_code_of_functions():
    found = {f"{fault.operator} {fault.nth}": fault.applied(SOURCE) for fault in _places("runs.py", SOURCE)}
    changed = {name: [line for line in text.splitlines() if line not in SOURCE] for name, text in found.items()}
    assert changed == {
        "join 0": ["        if (not end and end < self.limit + 1):"],
        "join 1": ["        if bool(end) or end < self.limit + 1:"],
        "compare 0": ["        if not end or (end <= self.limit + 1):"],
        "compute 0": ["        if not end or end < (self.limit - 1):"],
        "number 0": ["        if not end or end < self.limit + 2:"],
        "drop 0": ["            pass"],
        "keyword 0": ["            self.check(end)"],
        "number 1": ["            self.check(end, strict=False)"],
        "drop 1": ["            pass"],
        "choose 0": ['        return [(-x if x else 1) for x in "é"][end // 2]'],
        "number 2": ['        return [2 if x else -x for x in "é"][end // 2]'],
        "compute 1": ['        return [1 if x else -x for x in "é"][(end * 2)]'],
        "number 3": ['        return [1 if x else -x for x in "é"][end // 3]'],
    }
    with pytest.raises(ValueError, match="no such place"):
        Fault("runs.py", "Runs.below", "join", 2).applied(SOURCE)


def test_drawn_faults_are_the_same_for_a_seed():
    faults = drawn(20, 3, "dilkit/op")
    assert faults == drawn(20, 3, "dilkit/op") != drawn(20, 4, "dilkit/op")
    for fault in faults:
        assert (ROOT / fault.tests).is_dir()
        compile(fault.applied_in(ROOT), fault.file, "exec")
