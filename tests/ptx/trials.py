"""What the PTX is run on: the lists of the CUDA kernels' own tests, for each kind of device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from helpers.on_host import OnHost
from helpers.pairwise import every_pair
from helpers.steps import GPU_BIASES, GPU_DTYPES, GPU_LIMITS, GPU_SHAPES, StepCase, expected, gpu_case, in_pages, make_step
from ptx.backends import opened
from ptx.cuda_runs import DROPPED, KINDS, LISTED, PATTERNS, SCORED, SIZES
from ptx.launcher import Options, PTXError
from ptx.parse import UnknownPTX
from ptx.rounding import MEASURED, measured

from dilkit import Pattern, register_backend, unregister_backend
from dilkit.backends.tiles.backend import StepBackend, TiledBackend
from dilkit.device import Capability
from dilkit.testing.conformance import check
from dilkit.testing.problems import Case

CAPABILITIES: tuple[Capability, ...] = (7, 5), (8, 0), (9, 0), (10, 0), (12, 0)
STEP_BLOCKS = 5
"""Of a step, at once: so that pieces and merges of a row are computed by several."""

WAITING = 25
"""So many times as many turns of loops are taken by a step: its blocks wait for one another in loops."""

MANY_SPANS = replace(gpu_case(("float32", ""), "many", ""), spans=300, most=6)
"""More of them, and of writes, than a block has threads."""


@dataclass(frozen=True)
class Trial:
    """A case of a list, on a device of `capability`, by a backend; `rounded`: as devices are measured to round."""

    listed: str
    capability: Capability
    case: Case | StepCase
    rounded: bool = False
    backend: str = "cupy_raw"

    @property
    def architecture(self) -> str:
        return "sm_{}{}".format(*self.capability)

    @property
    def case_name(self) -> str:
        return self.case.name if isinstance(self.case, Case) else str(self.case)

    @property
    def name(self) -> str:
        return f"{self.backend} {self.listed} {self.architecture}{' rounded' * self.rounded} {self.case_name}"


@dataclass(frozen=True)
class Outcome:
    """Of a trial: its `reason` is "" where it passed, or was `skipped` for another. `worst`: the largest error in units of that
    of plain torch math, of which 2 are right and of gradients 3; of a step, of what is allowed. `seconds` of CPU time, compilers'
    too. `launches` that were run, where they were recorded."""

    trial: Trial
    seed: int
    reason: str
    worst: float
    seconds: float
    skipped: str = ""
    launches: int = 0


def sizes() -> Iterator[Trial]:
    """Every size of every kernel on every kind of device."""
    for capability, case in product(CAPABILITIES, dict.fromkeys(case for _, case in SIZES)):
        if case.dtype != "bfloat16" or capability >= (8, 0):
            yield Trial("sizes", capability, case)


def features() -> Iterator[Trial]:
    """The problem list, other kinds of patterns, dropped weights, changed scores: each case on one kind of device, in turn."""
    listed = {"list": LISTED, "kinds": of(KINDS[0] + KINDS[1]), "dropped": of(DROPPED), "scores": of(SCORED)}
    for name, cases in listed.items():
        for at, case in enumerate(cases):
            capability = CAPABILITIES[at % len(CAPABILITIES)]
            if not OnHost(capability).refusals(case.problem()):
                yield Trial(name, capability, case, rounded=at % 2 == 1)


def of(runs: list[tuple[Capability, Case]]) -> list[Case]:
    return list(dict.fromkeys(case for _, case in runs))


def steps() -> Iterator[Trial]:
    """Every two of dtypes, shapes and biases; many spans."""
    rows = [row.values for row in every_pair(GPU_DTYPES, GPU_SHAPES, GPU_BIASES) if not row.marks]
    for at, row in enumerate(rows):
        case = replace(gpu_case(*row), seed=at)
        yield Trial("steps", CAPABILITIES[at % len(CAPABILITIES)], case, rounded=at % 2 == 1)
    yield from (Trial("steps", capability, MANY_SPANS) for capability in CAPABILITIES)


def rounded() -> Iterator[Trial]:
    """Every size, and the whole problem list, on each kind of device whose rounding has been measured, with that."""
    yield from (replace(trial, rounded=True) for trial in sizes() if trial.capability in MEASURED)
    for capability, case in product(MEASURED, LISTED):
        if not OnHost(capability).refusals(case.problem()):
            yield Trial("list", capability, case, rounded=True)


def every_trial() -> list[Trial]:
    return list(dict.fromkeys((*sizes(), *rounded(), *features(), *steps())))


def small(head_dim: int, dtype: str) -> tuple[Trial, ...]:
    """Over several groups; over tiles that are full; packed; with rows that no head keeps. The first row, which is read where
    nothing should be, is NaN: what the mask ignores, and whole sequences."""
    fields: dict[str, Any] = dict(variant=str(head_dim), batch=1, heads=2, kv_heads=1, head_dim=head_dim, dtype=dtype)
    (groups, seq), (tall, long) = PATTERNS.values()
    masked: dict[str, Any] = dict(mask="left", values="ignored NaN")
    cases = (
        Case(feature="groups", pattern=groups, seq=seq, is_causal=True, **masked, **fields),
        Case(feature="tall", pattern=tall, seq=long, **masked, **fields),
        Case(feature="packed", pattern=groups, seq=seq, lengths=(70, 150, 80), is_causal=True, poisoned=True, **fields),
        Case(feature="kept by none", pattern=Pattern([60, 90], [3, 5]), seq=100, **fields),
    )
    return tuple(Trial("small", (8, 0), case) for case in cases)


TENSOR, PAIRS, SINGLE = small(32, "bfloat16"), small(128, "bfloat16"), small(32, "float32")
STEP = tuple(Trial("steps", (8, 0), case) for case in (gpu_case(("float32", ""), "grouped", "coordinates"), MANY_SPANS))
"""Of all kernels between them."""


def run(trial: Trial, seed: int, options: Options | None = None) -> Outcome:
    """A trial by itself: its launches have the same orders of warps wherever it is repeated."""
    start = cpu_seconds()
    given = replace(options or Options(), seed=seed)
    if isinstance(trial.case, StepCase):
        given = replace(given, resident=STEP_BLOCKS, loops=WAITING * given.loops)
    if trial.rounded:
        given = replace(given, rounding=measured(trial.capability))
    with opened(trial.backend, trial.capability, given) as (own, machine):
        try:
            reason, worst = (_run_case if isinstance(trial.case, Case) else _run_step)(trial, own)
        except (PTXError, UnknownPTX) as error:
            reason, worst = str(error), float("nan")
    skipped, launches = (machine.skipped, machine.launches.total()) if machine else ("", 0)
    skipped = skipped or reason * reason.startswith("refused")
    return Outcome(trial, seed, "" if skipped else reason, worst, cpu_seconds() - start, skipped, launches)


def cpu_seconds() -> float:
    """Of this process and of the compilers that it has run."""
    return sum(os.times()[:4])


def _run_case(trial: Trial, own: TiledBackend) -> tuple[str, float]:
    assert isinstance(trial.case, Case)
    register_backend(own)
    try:
        result = check(own.name, trial.case)
    finally:
        unregister_backend(own.name)
    return "" if result.verdict == "passed" else f"{result.verdict}: {'; '.join(result.reasons)}", result.worst


def _run_step(trial: Trial, own: TiledBackend) -> tuple[str, float]:
    """As it is, where no row begins at a multiple of 16 bytes, and with some rows in pages, where rows do."""
    assert isinstance(trial.case, StepCase)
    step, problem, limit = make_step(trial.case), trial.case.problem, GPU_LIMITS[trial.case.dtype]
    right, worst = expected(step, problem), 0.0
    assert isinstance(own, StepBackend)
    for given in (step, in_pages(step, problem)):
        for name, a, b in zip(("out", "lse"), own.attend_stored(given, problem), right, strict=True):
            if not torch.allclose(a.double(), b.double(), atol=limit, rtol=limit):
                return f"{name} is off by more than {limit}", float("inf")
            finite = b.isfinite()
            apart = (a.double() - b.double())[finite].abs() / (limit + limit * b.double()[finite].abs())
            worst = max([worst, *apart.tolist()])
    return "", worst
