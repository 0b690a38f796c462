"""GPU days for tests, with a sweep of given times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dilkit import Problem
from dilkit.device import probe
from dilkit.selection import tuned
from dilkit.tools.gpu_day import state
from dilkit.tools.gpu_day.preferences import sweep
from dilkit.tools.gpu_day.record import Choice, Finding, Found, GpuDayResult, StepRecord
from dilkit.tools.gpu_day.step import Context
from dilkit.tools.results.record import Samples


def choice(problem: Problem, **seconds: float) -> Choice:
    """A problem of the sweep as measured here, with other times."""
    found = sweep.measured(problem, Context("cpu", rehearse=True))
    times = {name: replace(found.entries[name], time=Samples.of([taken])) for name, taken in seconds.items()}
    return replace(found, entries=found.entries | times)


def day(*choices: Choice, **fields: Any) -> GpuDayResult:
    """A day of one step."""
    found = Found(choices=choices, findings=(Finding(what="x", verdict="noted"),))
    record = StepRecord(stage="preferences", name="sweep 1", what="", inputs="", ended="done", seconds=1.0, found=found)
    facts = dict(rehearsal=False, setup=tuned.setup_of(probe("cpu")), plan=(("preferences", "sweep 1"), ("preferences", "tiles")))
    return state.new_result(GpuDayResult, probe("cpu"), steps=(record,), **facts | fields)
