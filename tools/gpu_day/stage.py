"""A stage of a GPU day: its steps, one after the other, until its time is over. The stages themselves are processes, too.

stage process                                  step process
    inputs as they were: kept, not run
    else  ---------------------------------->  finding, finding, finding ...
    deadline of the step, or of the stage      (each written down at once)
    result into the file         <-----------  what it had found by then
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from dilkit.comm.launch import processes
from dilkit.comm.launch.processes import Ended, Job
from dilkit.threads import usable_cores
from dilkit.tools.console.text import in_seconds
from dilkit.tools.gpu_day import process, state
from dilkit.tools.gpu_day.plan import plan
from dilkit.tools.gpu_day.record import GpuDayResult, StepRecord
from dilkit.tools.gpu_day.step import Context, Step
from dilkit.tools.results.decode import decode

LEAST = 5.0
"""Seconds that must be left of a stage for a step to be begun."""
BESIDE = 30.0
"""Seconds that the process of a stage may take beside its steps: torch is imported, a step that hangs is ended."""
Say = Callable[[str], None]


def run(stage: str, context: Context, folder: Path, seconds: float, again: bool = False, say: Say = print) -> GpuDayResult:
    """Run the steps of a stage that are not kept in `folder`, or with `again` all, for at most `seconds`."""
    end, steps = time.monotonic() + seconds, plan(context.rehearse)
    result = state.begun(folder, context, steps)
    context = replace(context, wrong=result.wrong)
    for step in (step for step in steps if step.stage == stage):
        inputs = state.inputs_of(step, context)
        known = next((one for one in result.of(stage) if (one.name, one.inputs) == (step.name, inputs)), None)
        if known is not None and known.ended != "cut" and not again:
            say(f"{stage}: {step.what}: as before, {known.ended}")
            continue
        left = end - time.monotonic()
        if left < min(LEAST, step.seconds):
            say(f"{stage}: {step.what}: no time is left")
            continue
        record = _record(step, context, inputs, left)
        say(f"{stage}: {step.what}: {'WRONG, ' * record.wrong}{record.ended} in {in_seconds(record.seconds)}")
        result = state.keep(result, record, folder)
    return result


def _record(step: Step, context: Context, inputs: str, left: float) -> StepRecord:
    """What became of a step that is run now. That it was ended with its stage says nothing of it."""
    outcome = process.run(step, context, min(step.seconds, left))
    ended = "cut" if outcome.ended == "late" and left < step.seconds else outcome.ended
    names = dict(stage=step.stage, name=step.name, what=step.what, backend=step.backend, inputs=inputs)
    return StepRecord(**names, ended=ended, seconds=outcome.seconds, reasons=outcome.reasons, found=outcome.found)


def in_a_process(stage: str, context: Context, folder: Path, seconds: float, again: bool) -> Ended:
    """Run a stage in a process of its own, which is ended where it does not keep to its time; what it says is shown."""
    request = json.dumps(dict(context=asdict(context), folder=str(folder), seconds=seconds, again=again))
    command = [sys.executable, "-m", "dilkit.tools.gpu_day.stage", stage, request]
    return _shown(processes.start_processes([command], [{}], threads=usable_cores()), seconds + BESIDE)


def _shown(job: Job, limit: float) -> Ended:
    """The end of a job, whose output is shown on stderr as it comes."""
    shown, over = [0], threading.Event()

    def show(text: str) -> None:
        sys.stderr.write(text[shown[0] :])
        sys.stderr.flush()
        shown[0] = max(shown[0], len(text))

    def follow() -> None:
        while not over.wait(0.5):
            try:
                show(job.text)
            except (OSError, ValueError):  # its end has closed the file
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        ended = job.finish(limit)
    finally:
        over.set()
        thread.join()
    show(ended.text)
    return ended


def main(stage: str, request: str) -> int:
    """What the process of a stage runs."""
    asked = json.loads(request)
    say = lambda text: print(text, flush=True)  # noqa: E731
    run(stage, decode(Context, asked["context"]), Path(asked["folder"]), asked["seconds"], asked["again"], say)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
