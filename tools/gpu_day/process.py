"""`python -m dilkit.tools.gpu_day.process FOLDER`: do the step that is asked for in FOLDER, and write all that it finds there.

Who hangs is asked where, shortly before its deadline: all stacks go to stderr.
"""

from __future__ import annotations

import faulthandler
import json
import re
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dilkit import environment
from dilkit.comm.launch import processes
from dilkit.threads import usable_cores
from dilkit.tools.gpu_day.record import Found
from dilkit.tools.gpu_day.step import Context, Step, added
from dilkit.tools.results.decode import DecodeError, decode, encode
from dilkit.tools.results.file import write_text

REQUEST, FOUND = "request.json", "found.json"
BEFORE = 1.0
"""Seconds before its deadline at which a step that hangs is asked where."""
_STACK = re.compile(r"[Tt]hread 0x\w+.*\(most recent call first\):\n((?:  File .*\n)+)")


@dataclass(frozen=True)
class _Request:
    step: Step
    context: Context
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """How the process of a step ended: by itself, with an error, or "late"; and what it had found by then."""

    ended: str
    seconds: float
    reasons: tuple[str, ...] = ()
    found: Found = field(default_factory=Found)


def run(step: Step, context: Context, seconds: float) -> Outcome:
    """Run a step in a process of its own, for at most `seconds`; whatever it started ends with it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / REQUEST).write_text(json.dumps(asdict(_Request(step, context, seconds))))
        command = [sys.executable, "-m", "dilkit.tools.gpu_day.process", name]
        ended = processes.start_processes([command], [{}], threads=usable_cores()).finish(seconds)
        found = _found(folder / FOUND)
    if ended.code == processes.LATE:
        return Outcome("late", ended.seconds, (f"had not ended after {seconds:.0f} seconds{_place(ended.text)}",), found)
    if ended.code:
        return Outcome("failed", ended.seconds, (f"exit status {ended.code}: {_last_line(ended.text)}",), found)
    return Outcome("done", ended.seconds, (), found)


def _found(path: Path) -> Found:
    """What was written down; nothing, where it had not come to that."""
    try:
        return decode(Found, json.loads(path.read_text()))
    except (OSError, ValueError, DecodeError):
        return Found()


def _place(text: str) -> str:
    """Where a process hung, by the stack of its first thread, which is printed last."""
    stacks = _STACK.findall(text)
    lines = [" ".join(line.split()) for line in stacks[-1].splitlines()] if stacks else []
    own = [line for line in lines if not re.search(r"site-packages|lib/python", line)]
    return f"; it was at {(own or lines)[0]}" if lines else ""


def _last_line(text: str) -> str:
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["no output"])[-1]


def main(folder: Path) -> int:
    """Do the step, in which kernels need no proof: they are checked here. What it raises is shown as Python does."""
    asked = decode(_Request, json.loads((folder / REQUEST).read_text()))
    if asked.seconds > BEFORE:
        faulthandler.dump_traceback_later(asked.seconds - BEFORE)
    found = Found()
    with environment.without_proofs():
        for item in asked.step.items(asked.context):
            found = added(found, item)
            write_text(folder / FOUND, json.dumps(encode(found), allow_nan=False))
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
