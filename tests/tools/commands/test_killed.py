"""A command that is ended at any moment leaves whole files or none. `killing.py` does it with more commands and moments."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from helpers.command_line import in_subprocess

MOMENTS = 1
CODES = {"SIGKILL": -signal.SIGKILL, "SIGTERM": 143, "SIGINT": 130}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="a command is forked from a process that has loaded torch"),
]


@pytest.mark.parametrize(
    ("verb", "name"), [("demo", "SIGKILL"), ("bench --suite orders", "SIGTERM"), ("tune", "SIGINT"), ("report", "SIGKILL")]
)
def test_a_command_that_is_ended_leaves_whole_files_or_none(verb: str, name: str) -> None:
    pytest.importorskip("matplotlib", reason="pictures are among the files")
    script = str(Path(__file__).with_name("killing.py"))
    done = in_subprocess(script, verb, name, str(MOMENTS), OMP_NUM_THREADS="1")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == MOMENTS + 1, done.stderr
    last = found.pop()
    assert (last["code"], last["broken"], last["temporary"]) == (0, [], []), last
    for one in found:
        assert not one["broken"], one
        assert not one["temporary"] or name == "SIGKILL", one
        assert one["code"] in (CODES[name], 0, 1), one  # 0 and 1: it had ended by itself
        assert "Traceback" not in one["said"], one
