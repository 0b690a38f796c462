"""What a GPU day keeps in its folder: one file, written anew after every step. A step's result is kept by its inputs."""

from __future__ import annotations

import hashlib
import importlib
import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from dilkit.device import cuda_driver, device_named
from dilkit.selection import tuned
from dilkit.tools.gpu_day.record import GpuDayResult, StepRecord
from dilkit.tools.gpu_day.step import Context, Step
from dilkit.tools.results.environment import now
from dilkit.tools.results.file import new_result, read_result, write_result

STEM = "gpu-day"
PACKAGES = ("dilkit", "dilkit.backends", "dilkit.comm", "dilkit.tools")
CODE = (".py", ".so", ".cu", ".cuh")


def begun(folder: Path, context: Context, plan: tuple[Step, ...]) -> GpuDayResult:
    """What is kept in `folder`, without the steps whose inputs are others now; a result without steps where nothing is.

    Raises ValueError for a folder of another device, or of a rehearsal where this is none.
    """
    device = device_named(context.device)
    names = tuple((step.stage, step.name) for step in plan)
    facts = dict(rehearsal=context.rehearse, setup=tuned.setup_of(device), plan=names)
    new: GpuDayResult = new_result(GpuDayResult, device, **facts)
    path = folder / f"{STEM}.json"
    if not path.exists():
        return new
    before = read_result(path, GpuDayResult)
    here, there = ((one.environment.device_name, one.rehearsal) for one in (new, before))
    if here != there:
        what = f"{there[0]}{', a rehearsal' * there[1]}; here: {here[0]}{', a rehearsal' * here[1]}"
        raise ValueError(f"--out: {path} is of another device ({what}); name another folder")
    return with_steps(new, before.steps, context, plan)


def with_steps(result: GpuDayResult, steps: tuple[StepRecord, ...], context: Context, plan: tuple[Step, ...]) -> GpuDayResult:
    """`result` with those of `steps` whose inputs are what they would be now: first those that say what is wrong."""
    known = {(step.stage, step.name): step for step in plan}
    for first in (True, False):
        context = replace(context, wrong=result.wrong)
        mine = [one for one in steps if (one.stage == "correctness") == first and (one.stage, one.name) in known]
        fresh = [one for one in mine if one.inputs == inputs_of(known[one.stage, one.name], context)]
        result = replace(result, steps=(*result.steps, *fresh))
    return result


def keep(result: GpuDayResult, record: StepRecord, folder: Path) -> GpuDayResult:
    """`result` with a step in the place of an earlier one of its name, which is now in the file."""
    others = tuple(step for step in result.steps if (step.stage, step.name) != (record.stage, record.name))
    result = replace(result, steps=(*others, record), date=now())
    write_result(result, folder / f"{STEM}.json")
    return result


def inputs_of(step: Step, context: Context) -> str:
    """A digest of all that the result of a step depends on: code, device, driver, torch, and what is asked for.

    The later stages do not time what is wrong, so that they depend on that, too.
    """
    wrong = [] if step.stage == "correctness" else context.wrong
    asked = (step.stage, step.name, step.run, *step.options, context.device, str(context.rehearse), json.dumps(wrong))
    return _digest((*machine(context.device), *asked))


@lru_cache(maxsize=4)
def machine(device: str) -> tuple[str, ...]:
    """What every result depends on: the code, the device, its driver, and torch."""
    import torch

    facts = device_named(device)
    driver = str(cuda_driver()) if facts.type == "cuda" else "none"
    return code_digest(), facts.name, str(facts.capability), driver, torch.__version__


@lru_cache(maxsize=1)
def code_digest() -> str:
    """A digest of all code of dilkit, compiled code included."""
    folders = {Path(str(importlib.import_module(name).__file__)).parent for name in PACKAGES}
    files = sorted({path for folder in folders for path in folder.rglob("*") if path.suffix in CODE})
    return _digest(tuple(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files))


def _digest(parts: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
