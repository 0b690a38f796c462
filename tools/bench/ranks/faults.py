"""Faults: rank 1 of three fails before a call. When do the others know, and does what they say name rank and step?"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.tools.bench.ranks.call import RanksCall
from dilkit.tools.bench.ranks.rank import Task
from dilkit.tools.results.kinds.ranks import Fault

if TYPE_CHECKING:
    from dilkit.comm import Comm
    from dilkit.tools.console.launcher import Ended

KINDS = ("killed", "frozen", "raises", "disagrees")
RANKS, AT_FAULT = 3, 1
STEP = "of ring_dilated_attention"
_SPOKEN = "fault suite:"
_FAULT = re.compile(rf"{_SPOKEN} fault at ([\d.]+)")
_KNOWS = re.compile(rf"{_SPOKEN} rank (\d) knows at ([\d.]+): (.*)")


@dataclass(frozen=True)
class Fail(Task[None]):
    """One call that goes well; then rank 1 fails, and the others, who wait for `seconds`, print when they know, and what."""

    kind: str
    seconds: float

    def run(self, comm: Comm) -> None:
        call = _good_call(comm)
        comm.timeout = self.seconds
        if comm.rank == AT_FAULT:
            _speak(f"fault at {time.monotonic()}")
            call = _PROCESS_FAULTS[self.kind](call)
        try:
            call.once(call.shard())
        except Exception as error:
            _speak(f"rank {comm.rank} knows at {time.monotonic()}: {type(error).__name__}: {error}")
            raise


def read(kind: str, ended: Ended) -> Fault:
    """What became of a job of `Fail`."""
    at = [float(text) for text in _FAULT.findall(ended.text)]
    if not at:
        return Fault(failed=f"the fault did not come about: {ended.text[-500:]}")
    knows = [(int(rank), float(when), what) for rank, when, what in _KNOWS.findall(ended.text)]
    others = [(when, what) for rank, when, what in knows if rank != AT_FAULT or kind == "disagrees"]
    last = max((when for when, _ in others), default=ended.ended_at)
    found = _named(" ".join(what for _, what in others) or ended.text)
    error = others[0][1] if others else _launcher_says(ended.text)
    return replace(found, seconds=last - at[0], error=error, exit_code=ended.code, left_behind=ended.left_behind)


def on_threads(kind: str, timeout: float) -> Fault:
    """The same with threads as ranks, and a script in place of signals."""
    from dilkit.comm import Fault as Scripted
    from dilkit.comm import run_threads

    numbers = run_threads(RANKS, _calls_made)
    script = [Scripted("kill", rank=AT_FAULT, number=numbers[0] + 1)] if kind == "killed" else []
    seen, began = _Seen(), time.monotonic()
    try:
        run_threads(RANKS, partial(_fail_on_thread, kind=kind, seen=seen, timeout=timeout), timeout=timeout, faults=script)
    except BaseException as error:
        seen.raised = f"{type(error).__name__}: {error}"
    if not seen.known:
        return Fault(failed=f"no rank noticed: {seen.raised or 'all went well'}")
    seconds = max(seen.known) - (seen.at or began)
    return replace(_named(" ".join(seen.words)), seconds=seconds, error=seen.words[0], exit_code=1)


@dataclass
class _Seen:
    """When the fault came, when the others knew, and in what words."""

    at: float | None = None
    known: list[float] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    raised: str = ""


def _calls_made(comm: Comm) -> int:
    _good_call(comm)
    return comm._number


def _fail_on_thread(comm: Comm, kind: str, seen: _Seen, timeout: float) -> None:
    call = _good_call(comm)
    if comm.rank == AT_FAULT:
        seen.at = time.monotonic()
        if kind == "frozen":
            time.sleep(3 * timeout)
        call = _THREAD_FAULTS.get(kind, _unchanged)(call)
    try:
        call.once(call.shard())
    except Exception as error:
        if comm.rank != AT_FAULT:
            seen.known.append(time.monotonic())
            seen.words.append(f"{type(error).__name__}: {error}")
        raise


def _good_call(comm: Comm) -> RanksCall:
    call = RanksCall(comm, Problem(pattern=Pattern([16, 64], [1, 4]), seq=64, heads=4, head_dim=8))
    call.once(call.shard())
    return call


def _named(words: str) -> Fault:
    """Whether rank and step are named; a traceback that is marked with the rank says by itself where that was."""
    step = STEP in words or f"[rank {AT_FAULT}] Traceback" in words
    return Fault(names_rank=bool(re.search(rf"\brank {AT_FAULT}\b", words)), names_step=step)


def _launcher_says(text: str) -> str:
    """The line about a signal or an exception, where the ranks themselves said nothing."""
    for wanted in (rf"\[rank {AT_FAULT}\] \w+Error:", rf"rank {AT_FAULT}\b", "signal"):
        if lines := [line.strip() for line in text.splitlines() if re.search(wanted, line) and _SPOKEN not in line]:
            return lines[-1]
    return "nothing"


def _speak(line: str) -> None:
    """Print `line` in one piece: ranks write to the same place."""
    sys.stdout.write(f"{_SPOKEN} {line}\n")
    sys.stdout.flush()


def _raise(call: RanksCall) -> RanksCall:
    raise ZeroDivisionError("this rank's own fault")


def _signal(number: int, call: RanksCall) -> RanksCall:
    os.kill(os.getpid(), number)
    return call


def _disagrees(call: RanksCall) -> RanksCall:
    return replace(call, problem=replace(call.problem, pattern=Pattern([16, 64], [1, 2])))


def _unchanged(call: RanksCall) -> RanksCall:
    return call


_Change = Callable[[RanksCall], RanksCall]
_THREAD_FAULTS: dict[str, _Change] = {"raises": _raise, "disagrees": _disagrees}
_PROCESS_FAULTS: dict[str, _Change] = _THREAD_FAULTS | {
    "killed": partial(_signal, signal.SIGKILL),
    "frozen": partial(_signal, signal.SIGSTOP),
}
