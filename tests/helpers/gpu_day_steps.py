"""Steps of a GPU day for tests: one that says that it ran, one that hangs, one that raises, one that finds something wrong."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from dilkit.comm.launch.processes import Job
from dilkit.tools.gpu_day.step import Context, Item, Step, judged, noted


def noting(context: Context, log: str) -> Iterator[Item]:
    """Add a line to the file `log`."""
    with Path(log).open("a") as file:
        file.write("ran\n")
    yield noted("wrong so far", str(context.wrong))


def hangs(context: Context) -> Iterator[Item]:
    """Find one thing, then wait for what never comes."""
    yield noted("before", "found")
    faulthandler.dump_traceback_later(0.2)  # whose place is asked for at the deadline: this is when it has come here for sure
    time.sleep(600)


def fails(context: Context) -> Iterator[Item]:
    """Find one thing, then raise."""
    yield noted("before", "found")
    raise ZeroDivisionError("no such thing")


def finds(context: Context) -> Iterator[Item]:
    """Find that a backend is wrong in a dtype."""
    yield judged("some case", "off by one", "native", "float32")


def until_it_hangs(job: Job, end: float) -> bool:
    """Stand in for `Job._wait`: the deadline comes when a step has said where it hangs, however slow the machine is."""
    while job.code is None and "in hangs" not in job.text:
        time.sleep(0.05)
    return job.code is not None


def plan(log: Path) -> tuple[Step, ...]:
    """Return each of them, and a step of a later stage."""
    step = Step("correctness", "", "", 60, "helpers.gpu_day_steps:noting", (str(log),))
    return (
        replace(step, name="hangs", seconds=2.5, run="helpers.gpu_day_steps:hangs", options=(), backend="numba_cuda"),
        replace(step, name="fails", run="helpers.gpu_day_steps:fails", options=()),
        replace(step, name="finds", run="helpers.gpu_day_steps:finds", options=()),
        replace(step, name="last"),
        replace(step, stage="speed", name="timed"),
    )
