"""What the result of the CPU suite says."""

from __future__ import annotations

from collections.abc import Iterable

from dilkit.tools.console.text import in_seconds
from dilkit.tools.report.document import Axis, Document, Plot, Series, Table, plots, tables
from dilkit.tools.report.entries import grouped, quartiles, reasons, times_as_long
from dilkit.tools.report.headline import suite_headline
from dilkit.tools.report.points import speed_up
from dilkit.tools.report.roofline import Work, roofline
from dilkit.tools.report.speed import faster, speed_up_bars, speed_up_table
from dilkit.tools.report.targets import figure_table, suite_sentence
from dilkit.tools.results.kinds.cpu import CpuCase, CpuResult
from dilkit.tools.results.record import Case

HEADS = 8
COLUMNS = ("head_dim 64", "head_dim 128")
TIMES = ("configuration", "head_dim", "", "who", "time", "quartiles", "samples", "GFLOP/s", "of matmul", "time / native's")
SENTENCES = {
    "A: torch's dense attention over native": "at configuration A torch's dense attention takes {} as long as the CPU kernel",
    "forward: sdpa's time over native's, worst of A-D": "torch's own kernels on strided views at least {}",
    "one million tokens, forward: memory in all": "a forward pass of a million tokens needs {} of memory in all",
}
"""Figures by name, and the words that docs/measurements.md has for the worst value of each."""
METHOD = (
    "Medians of up to {} samples (three where calls are long), taken in turns, each one checked against fp64 arithmetic before. "
    "GFLOP/s count the pattern's nominal FLOPs, keys of several branches each time; the matmul is torch's in fp32, {} "
    "square, timed in the same rounds. gather is LongNet's published procedure in plain PyTorch: gather each branch by reshaping "
    "and taking diagonals, one call of torch's flash attention a branch, scatter into zeros, weights from the softmax "
    "denominators; its gradient is exact, where the published code detaches the weights. The fraction of the peak is that of "
    "dense attention on one thread, softmax included."
)


def sentence(result: CpuResult) -> str:
    """For README.md."""
    return suite_sentence(result, SENTENCES)


def document(result: CpuResult) -> Document:
    """All figures, times, speed-ups and rooflines."""
    dense: list[tuple[str, Case]] = [(f"A beside dense attention, d={step.head_dim}", step) for step in result.dense]
    cases = [*((case.title, case) for case in result.cases), *dense]
    found = [entry for name in ("sdpa", "gather", "dense") for entry in faster(cases, "native", name)]
    work = [Work(case, case.seq * HEADS * case.head_dim * 4, case.backward) for case in result.cases]
    at = result.environment
    place = f"{at.device_name}, instruction set {result.isa}, {result.thread_count} threads of {at.cores} cores"
    return Document(
        headline=suite_headline(result, place),
        tables=tables(figure_table(result.figures, COLUMNS), _times(result.cases), speed_up_table("native", found)),
        plots=plots(
            *speed_up_bars("native", found), roofline("Roofline: speed beside the measured matmul", work), _halves(result)
        ),
        notes=tuple(_notes(result)),
        method=METHOD.format(result.repeats, next((case.matmul.size for case in result.cases if case.matmul), 4096)),
    )


def _times(cases: Iterable[CpuCase]) -> Table:
    rows = []
    for case in sorted(cases, key=lambda c: (c.config, c.backward, c.head_dim, c.is_causal)):
        what = f"{'forward + backward' if case.backward else 'forward'}{', causal' * case.is_causal}"
        for name, entry in case.entries.items():
            if entry.time:
                time = in_seconds(entry.time.median_s), quartiles(entry.time), str(len(entry.seconds))
                speed = f"{entry.gflops or 0:,.0f}", f"{entry.matmul_fraction or 0:.0%}", times_as_long(case, name, "native")
                rows.append((case.config, str(case.head_dim), what, name, *time, *speed))
    return Table("All times", TIMES, tuple(rows))


def _halves(result: CpuResult) -> Plot:
    steps = [(f"head_dim {step.head_dim}", step.entries) for step in result.dtypes]
    series = tuple(
        Series(dtype, tuple(speed_up(at, entries["float32"].seconds, entries[dtype].seconds) for at, entries in steps))
        for dtype in ("bfloat16", "float16")
    )
    axes = Axis("", "number"), Axis("times fp32's speed", "times")
    return Plot("Half types beside fp32, configuration A", "bars", series, axes, mark=1.0)


def _notes(result: CpuResult) -> list[str]:
    """Who was not timed and why, and what is not among the figures."""
    cases: list[tuple[str, Case]] = [*((case.config, case) for case in result.cases), *(("dense", step) for step in result.dense)]
    lines = grouped(reasons(cases))
    for step in result.dtypes:
        bf16, fp16 = (step.ratio("float32", dtype) for dtype in ("bfloat16", "float16"))
        lines.append(f"A, head_dim {step.head_dim}: bf16 at {bf16:.2f}x, fp16 at {fp16:.2f}x of fp32's speed")
    for loops in result.inner_loops:
        of_dense, of_fma = f"{loops.tile_gflops:.0f} GFLOP/s in dense attention", f"{loops.fma_gflops:.0f} in multiply-adds"
        lines.append(f"one thread, head_dim {loops.head_dim}: {of_dense}, {of_fma} from registers")
    for million in result.million:
        lines.append(f"{million.seq:,} tokens: {in_seconds(million.time.median_s)}, {million.gflops:,.0f} GFLOP/s")
    return lines
