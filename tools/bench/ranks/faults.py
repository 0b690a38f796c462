"""Faults: rank 1 of three fails before a call. When do the others know, and does what they say name rank and step?"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dilkit.comm.launch.processes import Ended
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.tools.bench.ranks.record import Fault
from dilkit.tools.measure.ranks_call import RanksCall

if TYPE_CHECKING:
    from dilkit.comm import Comm

KINDS = ("killed", "frozen", "raises", "exits", "disagrees", "another version")
AGREED = ("disagrees", "another version")
"""Of which the ranks learn together, the one at fault too."""
CUTS = {
    "link down": ("ip", "link", "set", "eth0", "down"),
    "packets dropped": ("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", "8bit", "burst", "1", "limit", "1"),
}
"""Faults of a host's network, and what brings them about there: none of its packets leaves it any more."""
SPOKEN_SECONDS = 0.5
"""What a launcher takes at most to pass on what a rank said before its host was cut off."""
RANKS, AT_FAULT = 3, 1
STEP = "of ring_dilated_attention"
_ELSEWHERE = f"[rank {AT_FAULT}] Traceback", "waits for it in exchange"
"""What says where, too, when a rank that ends says it in the place of those that wait."""
_SPOKEN = "fault suite:"
_FAULT = re.compile(rf"{_SPOKEN} fault at ([\d.]+)")
_KNOWS = re.compile(rf"{_SPOKEN} rank (\d) knows at ([\d.]+): (.*)")


def fail(comm: Comm, kind: str, seconds: float, signals: bool = True) -> None:
    """One call that goes well; then rank 1 fails, and the others, who wait for `seconds`, print when they know, and what.

    `signals`: ranks are processes, which are killed and frozen by signals.
    """
    call = _good_call(comm)
    comm.timeout = seconds
    if comm.rank == AT_FAULT and kind in CUTS:
        _speak(f"fault at {time.monotonic() + SPOKEN_SECONDS}")
        time.sleep(SPOKEN_SECONDS)
        subprocess.run(CUTS[kind], check=True)
    elif comm.rank == AT_FAULT:
        _speak(f"fault at {time.monotonic()}")
        if kind == "raises":
            raise ZeroDivisionError("this rank's own fault")
        if kind == "exits":
            sys.exit(3)
        if kind == "another version":
            comm._version = b"0.0.1"
        elif kind == "disagrees":
            call = replace(call, problem=replace(call.problem, pattern=Pattern([16, 64], [1, 2])))
        elif signals:
            os.kill(os.getpid(), signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        elif kind == "frozen":
            time.sleep(3 * seconds)
    try:
        call.once(call.shard())
    except Exception as error:
        _speak(f"rank {comm.rank} knows at {time.monotonic()}: {type(error).__name__}: {error}")
        raise


def on_threads(kind: str, timeout: float) -> Fault:
    """What becomes of a fault where threads are ranks, and a script stands in for signals."""
    from dilkit.comm import Fault as Scripted
    from dilkit.comm import run_threads

    numbers = run_threads(RANKS, lambda comm: _good_call(comm).comm._number)
    script = [Scripted("kill", rank=AT_FAULT, number=numbers[0] + 1)] if kind == "killed" else []
    printed, began, raised = io.StringIO(), time.monotonic(), ""
    with contextlib.redirect_stdout(printed):
        try:
            task = partial(fail, kind=kind, seconds=timeout, signals=False)
            run_threads(RANKS, task, timeout=timeout, faults=script)
        except BaseException as error:
            raised = f"{type(error).__name__}: {error}"
    ended = time.monotonic()
    return read(kind, Ended(1, f"{printed.getvalue()}{raised}", ended - began, ended, 0))


def read(kind: str, ended: Ended) -> Fault:
    """What became of a job of `fail`."""
    at = [float(text) for text in _FAULT.findall(ended.text)]
    if not at:
        return Fault(failed=f"the fault did not come about: {ended.text[-500:]}")
    knows = [(int(rank), float(when), what) for rank, when, what in _KNOWS.findall(ended.text)]
    others = [(when, what) for rank, when, what in knows if rank != AT_FAULT or kind in AGREED]
    last = max((when for when, _ in others), default=ended.ended_at)
    words = " ".join(what for _, what in others) or ended.text
    return Fault(
        seconds=last - at[0],
        error=others[0][1] if others else _launcher_says(ended.text),
        exit_code=ended.code,
        left_behind=ended.left_behind,
        names_rank=bool(re.search(rf"\brank {AT_FAULT}\b", words)),
        names_step=any(text in words for text in (STEP, *_ELSEWHERE)),
    )


def _good_call(comm: Comm) -> RanksCall:
    call = RanksCall(comm, Problem(pattern=Pattern([16, 64], [1, 4]), seq=64, heads=4, head_dim=8))
    call.once(call.shard())
    return call


def _launcher_says(text: str) -> str:
    """The line about a signal or an exception, where the ranks themselves said nothing."""
    for wanted in (rf"\[rank {AT_FAULT}\] \w+:", rf"rank {AT_FAULT}\b", "signal"):
        if lines := [line.strip() for line in text.splitlines() if re.search(wanted, line) and _SPOKEN not in line]:
            return lines[-1]
    return "nothing"


def _speak(line: str) -> None:
    """Print `line` in one piece: ranks write to the same place."""
    sys.stdout.write(f"{_SPOKEN} {line}\n")
    sys.stdout.flush()
