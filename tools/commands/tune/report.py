"""What `dilkit tune` has found, as records and as text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from dilkit.environment import BACKEND
from dilkit.selection.tuned_file import TunedEntry, TunedSetup, TunedShape
from dilkit.tools.console.text import in_seconds, table


@dataclass(frozen=True)
class Place:
    """A backend in the order found, and its median seconds a call."""

    backend: str
    seconds: float


@dataclass(frozen=True)
class LeftOut:
    """A backend that was not measured, and why."""

    backend: str
    verdict: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """What became of one problem; `by_table` is the order in which its backends would come without being measured."""

    problem: str
    seq: int
    requires_grad: bool
    order: list[Place]
    left_out: list[LeftOut]
    by_table: list[str]


@dataclass(frozen=True)
class Report:
    """A run. `overridden`: the backends that DILKIT_BACKEND names."""

    file: str
    setup: str
    overridden: tuple[str, ...]
    problems: list[Found]
    interrupted: bool


def lines(report: Report) -> Iterator[str]:
    """For each problem the backends in the order found, then those left out."""
    yield from (f"on {report.setup}", "")
    for found in report.problems:
        yield from (*table([(found.problem,)], indent=0), *table(_rows(found)), "")
    if report.interrupted:
        yield "interrupted; what was measured before is kept"
    if report.overridden:
        yield f"{BACKEND.name}={','.join(report.overridden)} is set, and wins over what was measured"
    kept = any(found.order for found in report.problems)
    yield f"the automatic choice goes by {report.file}" if kept else "no backend was measured; the file is as it was"


def _rows(found: Found) -> Iterator[tuple[str, str, str]]:
    """Of the first it is said whether it would have been picked anyway."""
    expected = found.by_table[0] if found.by_table else None
    for i, place in enumerate(found.order):
        surprise = i == 0 and expected not in (None, place.backend)
        yield place.backend, in_seconds(place.seconds), f"unmeasured, it would have been {expected}" * surprise
    yield from ((one.backend, one.verdict, "\n".join(one.reasons)) for one in found.left_out)


def listed(entries: Sequence[TunedEntry], here: Collection[TunedSetup]) -> Iterator[str]:
    """What a file holds, setup by setup; `here` are the setups of this machine."""
    for setup in dict.fromkeys(entry.setup for entry in entries):
        yield from ("", f"{setup}{'' if setup in here else ' (does not hold here)'}")
        yield from table((_key(entry.shape), _times(entry)) for entry in entries if entry.setup == setup)


def _key(shape: TunedShape) -> str:
    flags = f"{', causal' if shape.is_causal else ''}{', training' if shape.requires_grad else ''}"
    return f"{shape.seq:,} tokens, {shape.branches}, {shape.dtype} x {shape.head_dim}{flags}"


def _times(entry: TunedEntry) -> str:
    return ", ".join(f"{name} {in_seconds(taken)}" for name, taken in entry.seconds)
