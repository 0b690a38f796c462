"""Who computes each kind of branch: `dilkit info --kinds`, and the same table of docs/backends.md."""

from __future__ import annotations

import json

import pytest

from dilkit import explain
from dilkit.device import Device
from dilkit.pattern.kinds.registry import KINDS
from dilkit.tools import cli
from dilkit.tools.commands.info.kinds import ASKED, OF_WHOLE_SEQUENCES, by_kind, examples, kind_cells
from dilkit.tools.site import picks


@pytest.mark.parametrize("device", ["sm_80", "sm_90"])
def test_on_gpus_from_8_0_on_what_is_left_to_the_definition_says_why(device: str) -> None:
    with picks._all_installed():
        cells = kind_cells(Device.assume(device), "bfloat16", picks._traced)
    left = [cell for cell in cells if cell.picked == "reference"]
    assert {cell.asked for cell in left} == {"with dropout", "cache of all keys"}
    for cell in left:
        why = " ".join(cell.refusals)
        named = ("dropout_p 0.1",) if cell.asked == "with dropout" else ("of a cache", "kv_cache")
        assert any(name in why for name in named), cell


def test_every_kind_has_an_example() -> None:
    own = {cls.kind for cls in KINDS.values() if cls.__module__.startswith("dilkit.")}
    assert {branch.kind for branch in examples().values()} == own


def test_the_command_says_it_for_the_device_at_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--kinds", "--device", "cpu", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["kinds"]
    own = kind_cells(Device.assume("cpu"), "float32", lambda problem: explain(problem))
    assert [(cell["kind"], cell["asked"], cell["picked"]) for cell in cells] == [(c.kind, c.asked, c.picked) for c in own]
    of_call = by_kind(own)["blocks of each call"]
    assert of_call == {asked: "-" if asked in OF_WHOLE_SEQUENCES else "native" for asked in ASKED}
    assert cli.main(["info", "--kinds", "--assume", "sm_61"]) == 0
    text = capsys.readouterr().out
    assert "each kind of branch on assumed" in text
    assert "left to the definition, which is slow: " in text
