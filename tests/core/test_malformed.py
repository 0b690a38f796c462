"""Every malformed call of the table raises the error it should, naming the argument and the limit."""

from __future__ import annotations

import pytest
import torch
from helpers.malformed.case import Case
from helpers.malformed.table import TABLE

from dilkit.environment import TUNED, VARIABLES


@pytest.mark.parametrize("part", sorted({name.split(": ")[0] for name in TABLE}))
def test_malformed(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        if variable is not TUNED:
            monkeypatch.delenv(variable.name, raising=False)
    wrong = {name: complaint(case) for name, case in TABLE.items() if name.startswith(f"{part}: ")}
    assert not {name: text for name, text in wrong.items() if text}


def complaint(case: Case) -> str:
    """What is wrong with the error that the call raises; nothing, of the right one."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as environment:
        for name, value in case.environment.items():
            environment.setenv(name, value)
        try:
            case.call()
        except case.error as error:
            missing = [fragment for fragment in case.fragments if fragment not in str(error)]
            return f"{missing} not in: {error}" if missing else ""
        except Exception as error:
            return f"raised {error!r}"
    return "raised nothing"


def test_the_table_is_long() -> None:
    assert len(TABLE) >= 300
