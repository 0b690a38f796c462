"""A step of a GPU day: a generator of findings, in a process of its own with a deadline.

    def step(context, *options):        # named "module:function" below `dilkit.tools.gpu_day`
        yield finding                   # written down at once: what comes after may hang

A step yields `Finding`s, `Choice`s of the sweep, or the part of the GPU suite that it has measured so far.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from dilkit.tools.gpu_day.record import Choice, Finding, Found

Item = Finding | Choice | dict[str, Any]
PACKAGE = "dilkit.tools.gpu_day"


@dataclass(frozen=True)
class Context:
    """Where a step runs: on `device`, or in a rehearsal on the CPU, at small sizes.

    `wrong`: (backend, dtype) of what is not to be timed; an empty dtype stands for all.
    """

    device: str
    rehearse: bool = False
    wrong: tuple[tuple[str, str], ...] = ()

    @property
    def kind(self) -> str:
        """The kind of device, as torch names it."""
        return self.device.partition(":")[0]

    def right(self, backend: str, dtype: str) -> bool:
        """Whether nothing is known to be wrong with a backend in a dtype."""
        return not {(backend, dtype), (backend, "")} & set(self.wrong)


@dataclass(frozen=True)
class Step:
    """A step of `stage`: its function, the words that it is called with, and the seconds that it may take.

    `backend`: the one that is wrong if the step does not come to its end.
    """

    stage: str
    name: str
    what: str
    seconds: float
    run: str
    options: tuple[str, ...] = ()
    backend: str = ""

    def items(self, context: Context) -> Iterator[Item]:
        """What it finds, one after the other."""
        module, _, name = self.run.partition(":")
        place = f"{PACKAGE}.{module}" if module.split(".")[0] in ("correctness", "speed", "preferences") else module
        function: Callable[..., Iterator[Item]] = getattr(importlib.import_module(place), name)
        return function(context, *self.options)


def added(found: Found, item: Item) -> Found:
    """`found` and one thing more; of the suite the later state takes the place of the earlier one."""
    if isinstance(item, Finding):
        return replace(found, findings=(*found.findings, item))
    if isinstance(item, Choice):
        return replace(found, choices=(*found.choices, item))
    return replace(found, suite=item)


def noted(what: str, found: str, **numbers: float) -> Finding:
    """A finding that is neither right nor wrong."""
    return Finding(what=what, verdict="noted", found=found, numbers=numbers)


def absent(what: str, found: str) -> Finding:
    """A finding of something that is not there, or cannot be here."""
    return Finding(what=what, verdict="absent", found=found)


def judged(what: str, wrong: str, backend: str = "", dtype: str = "", found: str = "") -> Finding:
    """A finding that is wrong if there are words for what is `wrong`; `found` is said where it is right."""
    verdict: Literal["wrong", "right"] = "wrong" if wrong else "right"
    return Finding(what=what, verdict=verdict, found=wrong or found, backend=backend, dtype=dtype)
