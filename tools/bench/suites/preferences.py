"""`dilkit bench --suite preferences`: on 128 problems the backend that the preference table picks, beside all that are able.

`dilkit tune --take` makes the automatic choice go by the sweep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from typing import Any

from dilkit import registry, selector
from dilkit.backend import Backend
from dilkit.device import cuda_count, device_named
from dilkit.problem import Problem
from dilkit.selection import tuned
from dilkit.selection.preference_table import row_of as preference_row
from dilkit.selection.preference_table import table_preference
from dilkit.tools.bench.configuration import Configuration
from dilkit.tools.bench.suite import NO_OPTION, Suite, SuiteSizes, SuiteStep
from dilkit.tools.bench.target import Target, each
from dilkit.tools.console.text import in_seconds
from dilkit.tools.measure.case import CaseRunner
from dilkit.tools.measure.implementation import backend_implementations
from dilkit.tools.report.document import Table
from dilkit.tools.report.views import Report
from dilkit.tools.results.rows import CaseRows, Row, RowsResult, rows_of

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
"""Patterns and lengths, those that launches decide on and long ones, each with or without a key padding mask."""
PARTS = 8
"""Every eighth problem is measured first, then the next ones: a run that ends early has seen every pattern."""
DTYPES, HEAD_DIMS, FLAGS = ("bfloat16", "float32"), (64, 128), (False, True)
LEFT_OUT = {"float32": ("triton",)}
"""By dtype, what is much slower than others: on an H200, exact products of fp32 took Triton about ten times as long."""
NEVER = ("numba_cuda", "reference", "flex")
"""Compiled for minutes, or for each problem anew; slower than all others."""
PICK = "automatic"
WRONG_FROM = 1.15
"""How many times as long as the fastest the picked backend may take before a row of the preference table is wrong."""
SHOWN = 12
"""Problems that the table of the sweep shows, the worst first."""


def seconds(case: CaseRows) -> dict[str, float]:
    """Return the median time of each backend that was measured, the fastest first."""
    return dict(sorted(((name, row.median_s) for name, row in case.rows.items() if row.samples), key=lambda pair: pair[1]))


def picked(case: CaseRows) -> str:
    """Return the backend that the preference table picks."""
    return str(case.rows[PICK].values["picked"])


def ratio(case: CaseRows) -> float | None:
    """Return the time of the picked backend over that of the fastest; None where the picked one was not measured."""
    times = seconds(case)
    return times[picked(case)] / min(times.values()) if picked(case) in times else None


ratios = each("sweep", ratio, "{problem}")
"""Read the ratio of each problem of the sweep that has one."""


def preference_rows(result: RowsResult) -> Iterator[Table]:
    """Make the table of those rows of the preference table that problems of the sweep fell under."""
    groups: dict[str, list[CaseRows]] = {}
    for case in result.cases("sweep"):
        groups.setdefault(case.rows[PICK].values["row"], []).append(case)
    rows = []
    for name, cases in groups.items():
        measured = [(value, case) for case in cases if (value := ratio(case)) is not None]
        slow = [case for value, case in measured if value > WRONG_FROM]
        fastest = ", ".join(sorted({next(iter(seconds(case))) for case in slow}))
        verdict = f"WRONG in {len(slow)}: {fastest}" if slow else "right" if measured else "not measured"
        worst = f"{max(value for value, _ in measured):.2f}" if measured else "-"
        rows.append((name, ", ".join(sorted(set(map(picked, cases)))), str(len(cases)), worst, verdict))
    header = ("row", "it says", "problems", "worst ratio", "measured")
    yield Table(f"Rows of the preference table: wrong from {WRONG_FROM} on", header, tuple(rows))


def worst_problems(result: RowsResult) -> Iterator[Table]:
    """Make the table of the problems on which the preference table is farthest from the fastest backend."""
    measured = sorted(((value, case) for case in result.cases("sweep") if (value := ratio(case))), key=lambda pair: -pair[0])
    rows = []
    for value, case in measured[:SHOWN]:
        times = seconds(case)
        shown = ", ".join(f"{name} {in_seconds(taken)}" for name, taken in times.items())
        rows.append((case.label("{problem}"), picked(case), next(iter(times)), f"{value:.2f}", shown))
    header = ("problem", "the table says", "the fastest", "ratio", "times")
    yield Table(f"The sweep: {len(measured)} problems, the worst first", header, tuple(rows))


def no_gpu(result: RowsResult) -> str | None:
    """Return why a figure of a GPU is missing from `result`, or None."""
    return None if result.environment.device == "cuda" else "no GPU"


SLOWEST = "the automatic choice over the fastest that is able, worst of the sweep"
CHOICE = Target(SLOWEST, WRONG_FROM, 1.05, ratios, lower=True, missing=no_gpu)
METHOD = (
    "Whatever is timed is checked against fp64 arithmetic just before. Times of the sweep are medians of calls in turns, by CUDA "
    "events. Its ratio: the time of the backend that the preference table picks, over that of the fastest that is able; "
    "numba_cuda, reference and flex are not among them, nor is triton in float32."
)
REPORT = Report(
    place="{device_name}, {threads} threads",
    tables=(preference_rows, worst_problems),
    sentences={SLOWEST: "at worst the automatic choice takes {} as long as the fastest"},
    method=METHOD,
)


@dataclass(frozen=True)
class PreferencesSizes(SuiteSizes):
    """`layers`: configurations of the sweep, each with or without a key padding mask."""

    divisor: int = 128
    layers: tuple[tuple[Configuration, bool], ...] = LAYERS


@dataclass(frozen=True)
class PreferencesSuite(Suite):
    """The sweep, part by part. `backend`: by default all that are able. `device`: where, in a rehearsal "cpu"."""

    NAME = "preferences"
    SUMMARY = "what the preference table picks beside the fastest backend, on 128 problems of a GPU"
    TARGETS = (CHOICE,)

    repeats: int = 5
    budget: float = 2.0
    backend: tuple[str, ...] = ()
    sizes: PreferencesSizes = field(default_factory=PreferencesSizes, metadata=NO_OPTION)
    device: str = field(default="cuda", metadata=NO_OPTION)

    def where(self) -> str:
        return self.device

    def steps(self) -> Iterator[SuiteStep]:
        if self.device != "cpu" and not cuda_count():
            raise ValueError("--suite preferences: torch sees no CUDA device; run it where `dilkit info` lists one")
        problems = [
            self.problem(layer, dim, dtype=dtype, is_causal=causal, requires_grad=train, key_padding_mask=masked)
            for (layer, masked), dtype, dim, causal, train in product(self.sizes.layers, DTYPES, HEAD_DIMS, FLAGS, FLAGS)
        ]
        for i in range(PARTS):
            yield from (SuiteStep("sweep", str(problem), partial(self.sweep, problem)) for problem in problems[i::PARTS])

    def problem(self, layer: Configuration, dim: int, **fields: Any) -> Problem:
        """Return the problem of a layer on the suite's device, its lengths divided where the suite is quick."""
        return layer.problem(dim, self.divisor, device=device_named(self.device), **fields)

    def sweep(self, problem: Problem) -> list[Row]:
        """Check and time every backend that is able, beside what the preference table picks, whatever `dilkit tune` says."""
        known = {name: backend for name, backend in registry.backends().items() if isinstance(backend, Backend)}
        names = self.backend or [name for name in known if name not in NEVER]
        able = [name for name in names if not known[name].refusals(problem) and name not in LEFT_OUT.get(problem.dtype, ())]
        runner = CaseRunner(backend_implementations(able), self.repeats, 0.01, self.budget, forward_memory=False)
        row, choice = preference_row(problem), selector.trace(problem, registry.backends(), (), table_preference(problem)).picked
        values = dict(picked=choice or "", row=row.where if row else "no row", shape=asdict(tuned.shape_of(problem)))
        case = dict(problem=str(problem))
        measured = rows_of("sweep", case, dict(entries=runner.run(problem)["entries"]))
        return [Row(table="sweep", case=case, who=PICK, values=values), *measured]
