"""Figures and report of the CPU suite: the kernel beside others, and beside what the machine can do at most."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from dilkit.environment import BF16_SETS
from dilkit.tools.bench.target import GIB, MIB, Target, each, rate_ratio, stored, time_ratio
from dilkit.tools.report import views
from dilkit.tools.report.document import Document, Table
from dilkit.tools.report.targets import TITLE, limit, suite_sentence, worst_first
from dilkit.tools.results.rows import CaseRows, ResultRow, RowsResult

SHARED = 1.32
"""A's nominal FLOPs over those that are left where a key of several branches is scored once."""
HEAD, SHORT, FORMS = "one head", "short heads", "configurations"
TIMED = HEAD, SHORT, FORMS, "dense", "masks", "encoder", "million"
MASKED = "torch, masked"
OURS, PUBLISHED = "native", "published procedure"
OTHERS = ("sdpa", "gather", "dense", MASKED, PUBLISHED)


def _of_peak(row: ResultRow, case: CaseRows, share: float = 1.0) -> float | None:
    """Nominal rate over `share` times that of the fastest multiply-adds in the same rounds; None where one was not timed."""
    if not (row.samples and row.values.get("flops") and case.timed("fma")):
        return None
    fma = case.rows["fma"]  # what disturbs a peak can only lower it
    return row.gflops / float(share * fma.values["gflops"] * fma.median_s / min(fma.samples))


def _peak(name: str, must: float, aim: float, table: str, share: float = 1.0, **facts: Any) -> Target:
    return Target(name, must, aim, each(table, lambda case: _of_peak(case.rows[OURS], case, share), "", **facts), "")


def _over(other: str, passes: str, must: float, aim: float) -> Target:
    facts = dict(causal=passes == "causal forward", backward=passes == "forward + backward")
    return Target(f"{passes}: {other}'s time / native's, worst", must, aim, time_ratio(FORMS, other, OURS, "{of}", **facts))


def _other_code(isa: str, result: RowsResult) -> str | None:
    return None if result.facts["isa"] == isa else f"{result.facts['code']} runs"


def _trained(isa: str, must: float, aim: float) -> Target:
    ratio, name = time_ratio("dtypes", "float32", "bfloat16", "d={head_dim}", backward=True), "A, forward + backward, all threads"
    other = partial(_other_code, isa)
    title = f"{name}: fp32's time / bf16's, on {isa}"
    return Target(title, must, aim, lambda result: {} if other(result) else ratio(result), missing=other)


D, N, OF_PEAK = "d={head_dim}", "native's, worst", f"nominal rate / ({SHARED} x peak)"
TARGETS = (
    _peak("dense forward / peak, head_dim 48", 0.72, 0.78, HEAD, head_dim=48, backward=False),
    _peak("dense forward / peak, head_dim 64", 0.75, 0.82, HEAD, head_dim=64, backward=False),
    _peak("dense forward / peak, head_dim 128", 0.78, 0.85, HEAD, head_dim=128, backward=False),
    _peak("dense forward + backward / peak, head_dim 48", 0.55, 0.70, HEAD, head_dim=48, backward=True),
    _peak("dense forward + backward / peak, head_dim 64", 0.60, 0.70, HEAD, head_dim=64, backward=True),
    _peak(f"A: forward, {OF_PEAK}", 0.68, 0.75, FORMS, SHARED, of="A, d=64", causal=False, backward=False),
    _peak(f"A: causal forward, {OF_PEAK}", 0.62, 0.75, FORMS, SHARED, of="A, d=64", causal=True, backward=False),
    _over("sdpa", "forward", 1.4, 1.8),
    _over("sdpa", "causal forward", 1.8, 2.5),
    _over("sdpa", "forward + backward", 1.4, 1.8),
    _over("gather", "forward", 2.2, 3.0),
    _over("gather", "causal forward", 2.8, 4.0),
    Target("one short head: torch's time / native's, worst", 1.0, 1.3, time_ratio(SHORT, "dense", OURS, "{seq:,} tokens")),
    Target(f"neighborhoods: time of torch with a mask / {N}", 8, 20, time_ratio("masks", MASKED, OURS, "{sides} on {grid}")),
    Target("one million tokens, all threads: nominal rate / A's", 0.95, 1.0, rate_ratio("million", OURS, "A", "")),
    Target(
        "one million tokens: memory in all", 16, 16,
        each("million", stored(OURS, ("held_bytes",), lambda held: held / GIB), "d=64"), " GiB", lower=True,
    ),
    Target(
        "A: memory beyond out and lse", 8, 2,
        each("memory", stored(OURS, ("scratch_bytes",), lambda scratch: scratch / MIB), D), " MiB", lower=True,
    ),
    Target("A, all threads: torch's dense attention / native", 8, 12, time_ratio("dense", "dense", OURS, D)),
    Target(
        "A, all threads: fp32's time / bf16's", 1.4, 1.9, time_ratio("dtypes", "float32", "bfloat16", D, backward=False),
        missing=lambda result: (
            None if result.facts["isa"] in BF16_SETS else f"{result.facts['code']} has no dot products of bf16 pairs"
        ),
    ),
    *(_trained(*limits) for limits in (("amx", 2.0, 3.0), ("avx512bf16", 1.0, 1.5), ("avx2", 0.97, 1.0))),
    Target(
        "GigaPath's encoder, forward + backward, bf16 on amx: published procedure's time / native's", 1.8, 2.5,
        time_ratio("encoder", PUBLISHED, OURS, "{tiles:,} tiles"), missing=partial(_other_code, "amx"),
    ),
)  # fmt: skip


def _notes(result: RowsResult) -> Iterator[str]:
    fastest = [case.rows["fma"] for case in result.cases(HEAD, SHORT, FORMS) if "fma" in case.rows and "threads" not in case.case]
    if rates := [row.values["gflops"] * row.median_s / min(row.samples) for row in fastest]:
        yield f"multiply-adds on one thread: {median(rates):,.0f} GFLOP/s, from {min(rates):,.0f} to {max(rates):,.0f} by step"


def machine(result: RowsResult) -> str:
    """Return the device with its instruction sets, such as "AMD EPYC, avx2"."""
    device = re.sub(r"\((R|TM)\)| CPU| Processor", "", result.environment.device_name)
    return ", ".join(filter(None, (device, result.facts.get("code"))))


class CpuReport(views.Report):
    """A report of several machines side by side: rows have the fact "machine"."""

    def document(self, *results: RowsResult) -> Document:
        rows = (replace(row, case=dict(machine=machine(one)) | row.case) for one in results for row in one.rows)
        document = self.made(replace(results[0], rows=tuple(rows)), _machine_table({machine(one): one for one in results}))
        headline = tuple(line for one in results for line in self.headline(one))
        notes = tuple(f"{machine(one)}: {note}" for one in results for note in self.all_notes(one))
        return replace(document, headline=headline, notes=notes)

    def sentence(self, *results: RowsResult) -> str:
        return " ".join(suite_sentence(one, self.sentences, machine(one)) for one in results)


def _machine_table(machines: Mapping[str, RowsResult]) -> Table:
    """Return every figure with its limits; a column for each machine has the worst value with its verdict."""
    columns = [{figure.name: figure for figure in one.figures} for one in machines.values()]
    every = {name: figure for column in columns for name, figure in column.items()}
    rows = []
    for name, figure in every.items():
        judged = [column.get(name) for column in columns]
        cells = ["not measured" if x is None else (f"{worst_first(x)[0]}: " if x.values else "") + x.verdict for x in judged]
        rows.append((name, limit(figure, "must"), limit(figure, "aim"), *cells))
    return Table(TITLE, ("figure", "must", "aim", *machines), tuple(rows), FIGURE_NOTE)


WHAT = views.fact("what", "case")
FIGURE_NOTE = (
    "fp32, on one thread unless it says otherwise. The peak is the fastest sample of multiply-adds in registers in "
    f"the same rounds; of A's nominal FLOPs {SHARED} times fewer are left where a key of several branches is scored once."
)
REPORT = CpuReport(
    place="{device_name}, instruction set {code} (torch: {torch_isa}), {thread_count} threads of {cores} cores",
    tables=(
        views.ResultTable(
            "Speed-up of native",
            TIMED,
            (WHAT, views.Column("over", views.WHO.cell), views.times_faster(OURS)),
            note="Ratios of medians, with 95% intervals by resampling each side's samples.",
            who=OTHERS,
            spread="{machine}",
        ),
        views.ResultTable(
            "All times, {machine}",
            TIMED,
            (
                *(WHAT, views.WHO, views.TIME, views.QUARTILES, views.SAMPLES),
                views.Column("GFLOP/s", lambda row, case: f"{row.gflops:,.0f}"),
                views.Column("of the peak", lambda row, case: "-" if (rate := _of_peak(row, case)) is None else f"{rate:.0%}"),
                views.over(OURS, "time / native's"),
            ),
        ),
    ),
    plots=(
        views.PlotView(
            "Speed-up of native over {who}, with 95% intervals",
            TIMED,
            "{what}",
            views.faster(OURS),
            (views.NAMES, views.TIMES),
            series="{machine}",
            mark=1.0,
            who=OTHERS,
        ),
    ),
    sentences={
        TARGETS[1].name: "on one thread the CPU kernel reaches {} of the multiply-add peak in dense attention",
        "A, all threads: torch's dense attention / native": "at configuration A torch's dense attention takes {} as long as it",
        "forward: sdpa's time / native's, worst": "torch's own kernels on strided views at least {}",
        "one million tokens: memory in all": "a forward pass of a million tokens needs {} of memory in all",
    },
    notes=_notes,
    method="Medians, three to twice {repeats} samples, fewer where calls are long, taken in turns with the multiply-adds, each "
    "implementation checked against fp64 arithmetic before. GFLOP/s count the pattern's nominal FLOPs, keys of several branches "
    "each time. gather is LongNet's published procedure in plain PyTorch: a call of torch's flash attention for each branch, "
    "weights from the softmax denominators; its gradient is exact, where the published code detaches the weights. dense is "
    "torch's attention of every token to every token; that with a mask has one of all pairs, made before. GigaPath's "
    "encoder is trained under autocast to bfloat16; embedding and gradients are compared on a short slide before.",
)
