"""The sweep: 128 problems, on each the backend that the preference table picks beside all that are able."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from dilkit import registry, selector
from dilkit.device import Device, device_named
from dilkit.problem import Problem
from dilkit.selection import tuned
from dilkit.selection.preference_table import row_of, table_preference
from dilkit.tools.bench.configuration import Configuration
from dilkit.tools.gpu_day import backends
from dilkit.tools.gpu_day.plan import PARTS
from dilkit.tools.gpu_day.record import Choice
from dilkit.tools.gpu_day.step import Context, Item
from dilkit.tools.measure.case import CaseRunner
from dilkit.tools.measure.implementation import backend_implementations

FIVE, RATES = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)
LAYERS: tuple[tuple[Configuration, bool], ...] = (
    (Configuration(131072, FIVE, RATES), False),
    (Configuration(8192, FIVE, RATES), False),
    (Configuration(32768, (512, 1024), (1, 2)), False),
    (Configuration(4096, (512, 1024), (1, 2)), False),
    (Configuration(262144, (2048, 8192, 32768, 131072), (1, 4, 16, 64)), False),
    (Configuration(65536, (2048,), (1,)), False),
    (Configuration(65536, FIVE, RATES), True),
    (Configuration(16384, (1000, 3000, 9000), (1, 3, 9)), False),
)
"""Patterns and lengths, those that launches decide on and long ones, and one with a key padding mask."""
DTYPES, HEAD_DIMS = ("bfloat16", "float32"), (64, 128)
REPEATS, MIN_TIME, BUDGET = 5, 0.01, 2.0
REHEARSED = 128
"""By what lengths are divided in a rehearsal, which takes one problem of each part."""


def problems(device: Device, divisor: int = 1) -> list[Problem]:
    """All 128: each pattern in two dtypes and head_dims, causal or not, forward and with gradients."""
    flags, found = (False, True), []
    for (layer, masked), dtype, dim, causal, train in product(LAYERS, DTYPES, HEAD_DIMS, flags, flags):
        facts = dict(dtype=dtype, device=device, is_causal=causal, requires_grad=train, key_padding_mask=masked)
        found.append(layer.problem(dim, divisor, **facts))
    return found


def part(context: Context, number: str) -> Iterator[Item]:
    """Part `number` of the sweep: every pattern and dtype at one head_dim, causal or not, forward or with gradients."""
    mine = problems(device_named(context.device), REHEARSED if context.rehearse else 1)[int(number) :: PARTS]
    for problem in mine[:1] if context.rehearse else mine:
        yield measured(problem, context)


def measured(problem: Problem, context: Context) -> Choice:
    """What the table picks for a problem, and what was measured. What is wrong is not timed; a call is checked before it is."""
    names = backends.timed(context, problem.dtype, backends.able(context))
    repeats, least = (1, 0.0) if context.rehearse else (REPEATS, MIN_TIME)
    runner = CaseRunner(backend_implementations(names), repeats, least, BUDGET, forward_memory=False)
    entries, row = runner.run(problem)["entries"], row_of(problem)
    return Choice(
        problem=str(problem),
        shape=tuned.shape_of(problem),
        row=row.where if row else "no row",
        picked=picked(problem),
        entries=entries,
    )


def picked(problem: Problem) -> str:
    """The automatic choice by the preference table alone, whatever `dilkit tune` has measured here."""
    trace = selector.trace(problem, registry.backends(), (), table_preference(problem))
    return trace.picked or ""
