"""`dilkit bench --suite seeds`: every figure that older implementations published (seeds.json), measured again."""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dilkit.comm import Comm
from dilkit.comm.launch.processes import transports
from dilkit.comm.launch.task import run
from dilkit.nn import DilatedAttention, MultiheadDilatedAttention
from dilkit.orders.token_order import TokenOrder, order
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors
from dilkit.threads import usable_cores
from dilkit.tools.bench.configuration import Configuration
from dilkit.tools.bench.suite import NO_OPTION, Suite, SuiteStep
from dilkit.tools.bench.workloads.rank_jobs import beside_one_rank, job_step, memory_note, peaks_of
from dilkit.tools.measure.case import CaseRunner
from dilkit.tools.measure.implementation import Implementation, backend_implementations
from dilkit.tools.measure.ranks_call import RanksCall
from dilkit.tools.report import views
from dilkit.tools.report.document import Document, Table
from dilkit.tools.report.headline import placed
from dilkit.tools.results.decode import decode
from dilkit.tools.results.rows import ResultRow, RowsResult, row_of, rows_of

CARD, PASS, MISSING, KIB, MIB = "GTX 1080", {"pass": "forward"}, "not measured", 2**10, 2**20
"""The hardware of all published figures (sm_61, 8 GB), and what the documents measured."""
HEAD_DIM, RANKS, MOST_CORES = 64, (1, 2), 4
LONG_CALL = 1e11
"""FLOPs of a call with fewer samples."""
MEASURES: dict[str, Callable[[ResultRow, ResultRow], float]] = {
    "ms": lambda row, base: 1000 * row.median_s,
    "tokens/s": lambda row, base: float(row.values["tokens"]) / row.median_s,
    "tokens/rank": lambda row, base: float(row.case["seq"] / row.case["ranks"]),
    "MiB": lambda row, base: _peak_bytes(row) / MIB,
    "KiB/token": lambda row, base: _per_token(row),
    "KiB/token ratio": lambda row, base: _per_token(row) / _per_token(base),
    "speedup": lambda row, base: base.median_s / row.median_s,
    "slowdown": lambda row, base: row.median_s / base.median_s,
    "reduction": lambda row, base: _peak_bytes(base) / _peak_bytes(row),
    "efficiency": lambda row, base: float(100 / row.case["ranks"] * _peak_bytes(base) / _peak_bytes(row)),
    "saved": lambda row, base: 100 * (1 - _peak_bytes(row) / _peak_bytes(base)),
}
"""Quantities of a row, or of it beside the base's."""


@dataclass(frozen=True)
class Setting:
    """Setting of a published table: `batch` sequences of `seq` tokens, sharded over so many ranks."""

    seq: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    batch: int = 1
    heads: int = 8
    dtype: str = "float32"
    ranks: int = 1

    def case(self) -> dict[str, Any]:
        return {name: "-".join(map(str, fact)) if isinstance(fact, tuple) else fact for name, fact in vars(self).items()} | PASS

    def problem(self, divisor: int = 1) -> Problem:
        configuration = Configuration(self.seq, self.segment_lengths, self.dilation_rates, self.heads)
        return configuration.problem(HEAD_DIM, divisor, batch=self.batch, dtype=self.dtype)


DATA: dict[str, Any] = json.loads(Path(__file__).with_name("seeds.json").read_text(encoding="utf-8"))
SETTINGS = {name: decode(Setting, facts, name) for name, facts in DATA["settings"].items()}
GROUPS = {group: [SETTINGS[name] for name in names] for group, names in DATA["groups"].items()}


@dataclass(frozen=True)
class SeedsSuite(Suite):
    """The shortest settings first."""

    NAME = "seeds"
    SUMMARY = "the tables that older implementations published, each figure beside what they claim"

    budget: float = 12.0
    settings: tuple[Setting, ...] = field(default=tuple(SETTINGS.values()), metadata=NO_OPTION)
    launcher: str = field(default_factory=lambda: next(iter(transports()), "threads"), metadata=NO_OPTION)

    def steps(self) -> Iterator[SuiteStep]:
        def weight(setting: Setting) -> float:
            return 0.5 + setting.problem(self.divisor).flops() / 4e10

        for setting in sorted((one for one in self.settings if one.ranks == 1), key=weight):
            what = ", ".join(map(str, setting.case().values()))
            yield SuiteStep("settings", what, partial(self.case, setting), weight(setting) * len(self.who(setting)))
        for ranks in RANKS:
            settings = sorted({replace(one, ranks=ranks): None for one in self.settings if one.ranks > 1}, key=weight)
            what, cost = f"{ranks} of {self.launcher}: {len(settings)} settings", 5 + sum(map(weight, settings))
            yield job_step("ranks", what, partial(self.over_ranks, ranks, settings), cost)

    def who(self, setting: Setting) -> tuple[str, ...]:
        """Return the names of the implementations that are compared at a setting."""
        if setting in GROUPS["implementations"]:
            return ("reference", "auto", "multihead")
        return ("auto", "ordered") if setting in GROUPS["orders"] else ("auto",)

    def case(self, setting: Setting) -> list[ResultRow]:
        """Check all implementations of a setting, time them in turns beside a matmul, measure memory including the inputs."""
        problem = setting.problem(self.divisor)
        samples = _samples(problem.flops(), self.repeats)
        implementations = [IMPLEMENTATIONS[name] for name in self.who(setting)]
        min_time = 0.0 if self.quick or samples < self.repeats else 0.03
        measured = CaseRunner(implementations, samples, min_time, self.budget, matmul_dtype="float32").run(problem)
        values = {name: dict(tokens=problem.batch * problem.seq) for name in measured["entries"]}
        return rows_of("settings", setting.case(), measured, values)

    def over_ranks(self, ranks: int, settings: Sequence[Setting]) -> list[ResultRow]:
        cores = min(MOST_CORES, usable_cores())
        task = partial(rows_over_ranks, suite=self, settings=settings, cores=cores)
        return run(self.launcher, ranks, task, threads=max(1, cores // ranks), limit=1200.0)


def rows_over_ranks(comm: Comm, suite: SeedsSuite, settings: Sequence[Setting], cores: int) -> list[ResultRow]:
    """Measure settings on every rank: ranks beside one rank that has all cores, in turns, and each rank's memory."""
    note, rows = memory_note(suite.launcher != "threads"), []
    for setting in settings:
        call = RanksCall(comm, setting.problem(suite.divisor))
        entries = beside_one_rank(call, cores, _samples(call.flops, suite.repeats))
        values: dict[str, Any] = dict(tokens=call.problem.batch * call.problem.seq, memory_note=note)
        if not note:  # calls were made before, so that nothing is loaded or planned in it
            values["rank_bytes"] = peaks_of(comm, partial(_with_inputs, call))
        case = setting.case() | dict(by=suite.launcher)
        rows += [row_of("ranks", case, who, entry, **(values if who == "ranks" else {})) for who, entry in entries.items()]
    return rows


def _samples(flops: float, repeats: int) -> int:
    return repeats if flops < LONG_CALL else min(3, repeats)


def _with_inputs(call: RanksCall) -> Any:
    """Return a rank's shard, without a gradient of the output, and the results of it."""
    inputs = call.shard()
    inputs = replace(inputs, dout=inputs.query)
    return inputs, call.once(inputs)


def _attention(inputs: Tensors, problem: Problem, order: TokenOrder | None = None) -> Tensor:
    out: Tensor = DilatedAttention(problem.pattern, order=order)(*inputs.qkv)
    return out


def _ordered(inputs: Tensors, problem: Problem) -> Tensor:
    """Attention along the curve through the grid of the tokens, which are given and come back row by row."""
    return _attention(inputs, problem, order=_grid_order(problem.seq))


def _grid_order(seq: int) -> TokenOrder:
    rows = next(side for side in range(math.isqrt(seq), 0, -1) if seq % side == 0)
    return order((rows, seq // rows))


def _out_of_order(inputs: Tensors, problem: Problem) -> Tensor:
    """Compute `_ordered` of tokens given along the curve, so that the result is attention as the oracle computes it."""
    curve = _grid_order(problem.seq)
    query, key, value = (curve.restore(x, 1) for x in inputs.qkv)
    out: Tensor = curve.apply(_ordered(replace(inputs, query=query, key=key, value=value), problem), 1)
    return out


def _multihead(inputs: Tensors, problem: Problem) -> Tensor:
    """Run the module with identity projections, which cost as any others but leave the attention's result."""
    module = _identity(problem.heads, problem.head_dim, problem.pattern, problem.dtype)
    out: Tensor = module(*(x.flatten(2) for x in inputs.qkv), need_weights=False)[0]
    return out.view(*out.shape[:2], problem.heads, problem.head_dim)


@lru_cache(maxsize=4)
def _identity(heads: int, head_dim: int, pattern: Pattern, dtype: str) -> nn.Module:
    size, kind = heads * head_dim, getattr(torch, dtype)
    module = MultiheadDilatedAttention(size, heads, DilatedAttention(pattern), dtype=kind)
    for parameter in module.parameters():
        for part in torch.split(parameter, size):
            nn.init.eye_(part) if part.dim() == 2 else nn.init.zeros_(part)
    return module


AUTO = Implementation("auto", "the automatic choice of backend", _attention)
IMPLEMENTATIONS = {
    "reference": backend_implementations(["reference"])[0],
    "auto": AUTO,
    "multihead": replace(AUTO, name="multihead", attend=_multihead),
    "ordered": replace(AUTO, name="ordered", attend=_ordered, checked=replace(AUTO, attend=_out_of_order)),
}


def claims(result: RowsResult) -> Iterator[tuple[str, dict[str, Any], float | None, str]]:
    """Yield documents' published figures, each with ours in its place, or the reason why there is none."""
    for document, figures in DATA["documents"].items():
        for facts in figures:
            try:
                yield document, facts, _ours(result, facts), ""
            except LookupError as missing:
                yield document, facts, None, str(missing.args[0])


def _ours(result: RowsResult, facts: dict[str, Any]) -> float:
    """Return our figure in place of a published one. Raises LookupError, with the reason, if there is none."""

    def at(setting: Setting, who: str | None) -> ResultRow:
        who = who or ("ranks" if setting.ranks > 1 else "auto")
        cases = result.cases("ranks" if who in ("ranks", "one rank") else "settings", **setting.case())
        row = next((case.rows[who] for case in cases if who in case.rows), None)
        if row and row.samples:
            return row
        raise LookupError(f"{row.verdict}: {'; '.join(row.reasons)}" if row and row.reasons else MISSING)

    if "setting" not in facts:
        raise LookupError("nothing to measure")
    setting, base = SETTINGS[facts["setting"]], SETTINGS.get(facts.get("base"))
    row = at(setting, facts.get("who"))
    if base and facts["quantity"] == "exponent":
        settings = [one for one in GROUPS["lengths"] if base.seq <= one.seq <= setting.seq]
        points = [(math.log(one.seq), math.log(at(one, row.who).median_s)) for one in settings]
        return statistics.linear_regression(*zip(*points, strict=True)).slope
    return MEASURES[facts["quantity"]](row, at(base, facts.get("base_who")) if base else row)


def _peak_bytes(row: ResultRow) -> int:
    """Peak memory with inputs, over ranks of the one that needs most. Raises LookupError where it was not measured."""
    if known := row.values.get("memory_bytes") or max(row.values.get("rank_bytes", (0,))):
        return int(known)
    raise LookupError(MISSING)


def _per_token(row: ResultRow) -> float:
    return _peak_bytes(row) / KIB / float(row.values["tokens"])


def _claim_table(result: RowsResult) -> Iterator[Table]:
    rows = []
    for document, facts, ours, about in claims(result):
        unit = DATA["units"][facts["quantity"]]
        if ours is not None:
            about = (f"{ours:,.0f}" if abs(ours) >= 1000 or ours == int(ours) else f"{ours:.3g}") + unit
        figure, note = f"{document}: {facts['figure']}", DATA["notes"].get(facts.get("note"), "")
        rows.append((figure, f"{facts['claimed']:,.12g}{unit}", about, note))
    yield Table("Every published figure", ("figure", f"claimed, {CARD}", "ours here", "what to know about it"), tuple(rows))


def _summary(result: RowsResult) -> str:
    ours = [one is not None for _, _, one, _ in claims(result)]
    return placed(result, f"{sum(ours)} of the {len(ours)} figures that older implementations published were measured again")


class SeedsReport(views.Report):
    """A report on what the figures need of a result, which may have other implementations and passes."""

    def document(self, *results: RowsResult) -> Document:
        needed = (*IMPLEMENTATIONS, "ranks", "one rank", "the job")
        return super().document(replace(results[0], rows=tuple(row for row in results[0].rows if row.who in needed)))


REPORT = SeedsReport(
    summary=_summary,
    place="{device_name}, {threads} threads of {cores} cores",
    tables=(_claim_table,),
    method="Medians of {repeats} samples taken in turns (two or three where calls are long), everyone checked against fp64 "
    "arithmetic just before, on random tensors of 64 dimensions a head. Memory is the peak with inputs counted: query, key and "
    "value; over ranks, of the rank that needs most. Over ranks both sides are timed in turns in one job, the cores shared out "
    "among them. Ours compute LongNet's pattern, in which every head takes part in every branch; what they measured is the "
    "attention of each head in one branch alone, a fraction of the work.",
)
