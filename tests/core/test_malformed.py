"""Every malformed call of the table raises the error it should, naming the argument and the limit."""

from __future__ import annotations

import pytest
from helpers.malformed.case import Case
from helpers.malformed.table import TABLE

from dilkit.environment import TUNED, VARIABLES


@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE)
def test_malformed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        if variable is not TUNED:
            monkeypatch.delenv(variable.name, raising=False)
    for name, value in case.environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(case.error) as caught:
        case.call()
    missing = [fragment for fragment in case.fragments if fragment not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def test_the_table_is_long() -> None:
    assert len(TABLE) >= 300
