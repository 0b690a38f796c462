"""Faults: rank 1 of three fails before a call; the seconds until the others know, and the rank and step in their errors."""

import os
import re
import signal
import subprocess
import sys
import time

from dilkit.comm import Comm
from dilkit.comm.launch.processes import Ended, JobError
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.tools.measure.ranks_call import RanksCall
from dilkit.tools.report.views import Column, ResultTable, fact
from dilkit.tools.results.rows import CaseRows, ResultRow

FAULTS = ("killed", "frozen", "raises")
CUTS = {
    "link down": ("ip", "link", "set", "eth0", "down"),
    "packets dropped": ("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", "8bit", "burst", "1", "limit", "1"),
}
"""Faults of a host's network, after which none of its packets leaves it, and the commands that cause them there."""
SPOKEN_SECONDS = 0.5
"""Seconds that a launcher takes at most to pass on what a rank said before its host was cut off."""
FAULT_RANKS, AT_FAULT = 3, 1
NAMED_STEPS = "of ring_dilated_attention", f"[rank {AT_FAULT}] Traceback"
"""Words that name the step: those of ranks that wait, and those of a rank that raised."""
SLACK = 2.0
"""Seconds beyond the timeout within which an error must come."""


def _said(row: ResultRow, case: CaseRows) -> str:
    words: str = row.values["error"]
    return words if len(words) < 150 else f"{words[:147]}..."


FAULT_TABLE = ResultTable(
    "Faults",
    "faults",
    (
        *(fact("kind", "rank 1"), fact("transport", "ranks are"), fact("timeout", template="{:g} s")),
        Column("others knew after", lambda row, case: f"{max(row.values['seconds'], 0):.2f} s"),
        Column("what was said", _said),
    ),
    timed=False,
)


def fail(comm: Comm, kind: str, seconds: float) -> None:
    """Make one call that goes well. Then rank 1 fails, and the others, who wait for `seconds`, print when they know, and what."""
    call = RanksCall(comm, Problem(pattern=Pattern([16, 64], [1, 4]), seq=64, heads=4, head_dim=8))
    call.once(call.shard())
    comm.timeout = seconds
    if comm.rank == AT_FAULT and kind in CUTS:
        _print(f"fault at {time.monotonic() + SPOKEN_SECONDS}")
        time.sleep(SPOKEN_SECONDS)
        subprocess.run(CUTS[kind], check=True)
    elif comm.rank == AT_FAULT:
        _print(f"fault at {time.monotonic()}")
        if kind == "raises":
            raise ZeroDivisionError("this rank's own fault")
        os.kill(os.getpid(), signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
    try:
        call.once(call.shard())
    except Exception as error:
        _print(f"rank {comm.rank} knows at {time.monotonic()}: {type(error).__name__}: {error}")
        raise


def fault_row(kind: str, transport: str, timeout: float, ended: Ended) -> ResultRow:
    """Return the row of a job of `fail`: seconds until the last of the others knew, and what they said. Raises JobError."""
    begun = re.search(r"fault suite: fault at ([\d.]+)", ended.text)
    if not begun:
        raise JobError(f"the fault did not come about: {ended.text[-500:]}")
    knows = re.findall(r"fault suite: rank (\d) knows at ([\d.]+): (.*)", ended.text)
    others = [(float(when), what) for rank, when, what in knows if int(rank) != AT_FAULT]
    last = max((when for when, _ in others), default=ended.ended_at)
    words = " ".join(what for _, what in others) or ended.text
    of_launcher = [line.strip() for line in ended.text.splitlines() if "fault suite:" not in line]
    wanted = rf"\[rank {AT_FAULT}\] \w+:", rf"rank {AT_FAULT}\b", "signal"
    launcher_says = next((line for text in wanted for line in reversed(of_launcher) if re.search(text, line)), "nothing")
    values = dict(
        timeout=timeout,
        seconds=last - float(begun[1]),
        error=others[0][1] if others else launcher_says,
        left_behind=ended.left_behind,
        names_rank=bool(re.search(rf"\brank {AT_FAULT}\b", words)),
        names_step=any(text in words for text in NAMED_STEPS),
    )
    return ResultRow(table="faults", case=dict(kind=kind, transport=transport), who=f"rank {AT_FAULT}", values=values)


def _print(line: str) -> None:
    """Print `line` in one piece: ranks write to the same place."""
    sys.stdout.write(f"fault suite: {line}\n")
    sys.stdout.flush()
