"""`dilkit bench --suite preferences`: the backend that the preference table picks, beside all that are able."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product

from dilkit import registry, selector
from dilkit.backend import Backend
from dilkit.device import cuda_count, device_named
from dilkit.problem import Problem
from dilkit.selection import tuned
from dilkit.selection.preference_table import row_of as preference_row, table_preference
from dilkit.tools.bench.configuration import Configuration
from dilkit.tools.bench.suite import NO_OPTION, Suite, SuiteSizes, SuiteStep
from dilkit.tools.bench.target import Target, each
from dilkit.tools.measure.case import CaseRunner
from dilkit.tools.measure.implementation import backend_implementations
from dilkit.tools.report.document import Table
from dilkit.tools.report.views import Report
from dilkit.tools.results.rows import CaseRows, ResultRow, RowsResult, rows_of

FIVE, RATES = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)
LAYERS = (
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
"""Backends by dtype that are much slower than others: on an H200, exact products of fp32 took Triton about ten times as long."""
NEVER = ("numba_cuda", "reference", "flex")
"""Compiled for minutes, or for each problem again; slower than all others."""
PICK = "automatic"
WRONG_FROM = 1.15
"""Time of the picked backend over that of the fastest from which a row of the preference table counts as wrong."""


def ratio(case: CaseRows) -> float | None:
    """Return the time of the picked backend over that of the fastest; None where the picked one was not measured."""
    times = {name: row.median_s for name, row in case.rows.items() if row.samples}
    picked = case.rows[PICK].values["picked"]
    return times[picked] / min(times.values()) if picked in times else None


ratios = each("sweep", ratio, "{problem}")
"""Read the ratio of each problem of the sweep that has one."""


def preference_rows(result: RowsResult) -> Iterator[Table]:
    """Make the table of those rows of the preference table that problems of the sweep fell under."""
    groups: dict[str, list[CaseRows]] = {}
    for case in result.cases("sweep"):
        groups.setdefault(case.rows[PICK].values["row"], []).append(case)
    rows = []
    for name, cases in groups.items():
        picked = sorted({str(case.rows[PICK].values["picked"]) for case in cases})
        measured = [(value, case) for case in cases if (value := ratio(case)) is not None]
        slow = [[row for row in case.rows.values() if row.samples] for value, case in measured if value > WRONG_FROM]
        fastest = ", ".join(sorted({min(timed, key=lambda row: row.median_s).who for timed in slow}))
        verdict = f"WRONG in {len(slow)}: {fastest}" if slow else "right" if measured else "not measured"
        worst = [f"{value:.2f}: {case.label('{problem}')}" for value, case in sorted(measured, key=lambda pair: -pair[0])[:1]]
        rows.append((name, ", ".join(picked), str(len(cases)), *(worst or "-"), verdict))
    header = ("row", "it says", "problems", "worst ratio", "measured")
    yield Table(f"Rows of the preference table: wrong from {WRONG_FROM} on", header, tuple(rows))


def no_gpu(result: RowsResult) -> str | None:
    """Return why a figure of a GPU is missing from `result`, or None."""
    return None if result.environment.device == "cuda" else "no GPU"


SLOWEST = "the automatic choice over the fastest that is able, worst of the sweep"
CHOICE = Target(SLOWEST, WRONG_FROM, 1.05, ratios, lower=True, missing=no_gpu)
METHOD = (
    "Whatever is timed is checked against fp64 arithmetic just before. Times of the sweep are with launches: medians of calls in "
    "a row, in turns, by CUDA events. Its ratio: the time of the backend that the preference table picks, over that of the "
    "fastest that is able; numba_cuda, reference and flex are not among them, nor is triton in float32."
)
REPORT = Report(
    place="{device_name}, {threads} threads",
    tables=(preference_rows,),
    sentences={SLOWEST: "at worst the automatic choice takes {} as long as the fastest"},
    method=METHOD,
)


@dataclass(frozen=True)
class PreferencesSuite(Suite):
    """The sweep, part by part. `backend`: by default all that are able. `device`: where, in a rehearsal "cpu"."""

    NAME = "preferences"
    SUMMARY = "what the preference table picks beside the fastest backend, on 128 problems of a GPU"
    TARGETS = (CHOICE,)

    repeats: int = 5
    budget: float = 2.0
    backend: tuple[str, ...] = ()
    sizes: SuiteSizes = field(default=SuiteSizes(128), metadata=NO_OPTION)
    device: str = field(default="cuda", metadata=NO_OPTION)

    def where(self) -> str:
        return self.device

    def steps(self) -> Iterator[SuiteStep]:
        if self.device != "cpu" and not cuda_count():
            raise ValueError("--suite preferences: torch sees no CUDA device; run it where `dilkit info` lists one")
        selector.requested_backends(self.backend or None)
        problems = [
            layer.problem(
                dim, self.divisor, device=device_named(self.device),
                dtype=dtype, is_causal=causal, requires_grad=train, key_padding_mask=masked,
            )
            for (layer, masked), dtype, dim, causal, train in product(LAYERS, DTYPES, HEAD_DIMS, FLAGS, FLAGS)
        ]  # fmt: skip
        for i in range(PARTS):
            yield from (SuiteStep("sweep", str(problem), partial(self.sweep, problem)) for problem in problems[i::PARTS])

    def sweep(self, problem: Problem) -> list[ResultRow]:
        """Check and time every backend that is able, beside what the preference table picks, whatever `dilkit tune` says."""
        known = {name: backend for name, backend in registry.backends().items() if isinstance(backend, Backend)}
        names = self.backend or [name for name in known if name not in NEVER]
        able = [name for name in names if not known[name].refusals(problem) and name not in LEFT_OUT.get(problem.dtype, ())]
        runner = CaseRunner(backend_implementations(able), self.repeats, 0.01, self.budget, matmul_dtype="")
        row, choice = preference_row(problem), selector.trace(problem, registry.backends(), (), table_preference(problem)).picked
        values = dict(picked=choice or "", row=row.where if row else "no row", shape=asdict(tuned.shape_of(problem)))
        case = dict(problem=str(problem))
        measured = rows_of("sweep", case, dict(entries=runner.run(problem)["entries"]))
        return [ResultRow(table="sweep", case=case, who=PICK, values=values), *measured]
