"""What the result of the GPU suite says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dilkit.problem import DTYPE_BYTES
from dilkit.tools.bench.gpu.record import OURS, GpuResult, SeqCase
from dilkit.tools.console.text import in_bytes, in_seconds
from dilkit.tools.report.document import Axis, Document, Plot, Point, Table, plots, tables
from dilkit.tools.report.entries import grouped, quartiles, reasons, times_as_long
from dilkit.tools.report.headline import suite_headline
from dilkit.tools.report.points import sampled, series_of
from dilkit.tools.report.roofline import Work, roofline
from dilkit.tools.report.speed import faster, speed_up_bars, speed_up_table
from dilkit.tools.report.targets import figure_table, suite_sentence
from dilkit.tools.results.record import Case

HEADS = 8
COLUMNS = ("head_dim 64", "head_dim 128")
TIMES = ("configuration", "dtype", "head_dim", "", "who", "time", "quartiles", "TFLOP/s", "of matmul", "time / cupy_raw's")
SENTENCES = {
    "fp32 forward: sdpa memory-efficient's time over cupy_raw's, worst of A-C, causal and not": (
        "in fp32 torch's memory-efficient kernel takes at least {} as long as the CUDA kernels"
    ),
    "A: bf16 forward, the fastest sdpa kernel's time over cupy_raw's": "in bf16 torch's fastest {}",
    "the longest sequence, bf16 forward on one GPU": "the longest sequence measured has {}",
}
"""Figures by name, and the words that docs/measurements.md has for the worst value of each."""
METHOD = (
    "CUDA events around each call by itself, the L2 cache flushed before it, implementations in turns, medians; a matmul of the "
    "same dtype, 4096 square, and a copy of 1 GiB are timed in the same rounds. Each implementation is checked against fp64 "
    "arithmetic just before it is timed, a short problem as a whole and rows at the real length. TFLOP/s count the pattern's "
    "nominal FLOPs, keys of several branches each time; a backward pass counts 2.5 times a forward pass. sdpa:NAME is torch's "
    "kernel of that name on strided views, one call a block, merged by lse. Where launches count, calls follow each other "
    "without a pause."
)


def sentence(result: GpuResult) -> str:
    """For README.md."""
    return suite_sentence(result, SENTENCES)


def document(result: GpuResult) -> Document:
    """All figures, times, speed-ups and rooflines."""
    cases = [(case.title, case) for case in result.cases]
    ratios = [entry for name in result.backends if name != OURS[0] for entry in faster(cases, OURS[0], name)]
    at = result.environment
    device = f"{at.device_name}, capability {at.capability}, CUDA {at.cuda}" if at.capability else f"{at.device_name}: NO GPU"
    return Document(
        headline=suite_headline(result, device),
        tables=tables(figure_table(result.figures, COLUMNS), _times(result), speed_up_table(OURS[0], ratios)),
        plots=plots(_over_lengths(result.seeds), *speed_up_bars(OURS[0], ratios), *_rooflines(result)),
        notes=(*grouped(reasons(result.titled())), *_notes(result)),
        method=METHOD,
    )


def _times(result: GpuResult) -> Table:
    ordered = sorted(result.cases, key=lambda c: (c.config, c.backward, c.dtype, c.head_dim, c.is_causal))
    rows: list[tuple[str, ...]] = []
    for case in ordered:
        what = f"{'backward' if case.backward else 'forward'}{', causal' * case.is_causal}"
        rows += _rows((case.config, case.dtype, str(case.head_dim), what), case)
    for cases, what in ((result.launch_bound, "forward, launches too"), (result.seeds, "forward")):
        for step in cases:
            rows += _rows((f"B, {step.seq:,} tokens", "float32", "64", what), step)
    return Table("All times", TIMES, tuple(rows))


def _rows(start: tuple[str, ...], case: Case) -> Iterator[tuple[str, ...]]:
    for name, entry in case.entries.items():
        if entry.time:
            speed = f"{(entry.gflops or 0) / 1000:,.1f}", f"{entry.matmul_fraction or 0:.0%}"
            time = in_seconds(entry.time.median_s), quartiles(entry.time)
            yield (*start, name, *time, *speed, times_as_long(case, name, OURS[0]))


def _over_lengths(cases: Iterable[SeqCase]) -> Plot:
    lines: dict[str, list[Point]] = {}
    for case in cases:
        for name, entry in case.entries.items():
            if entry.time:
                lines.setdefault(name, []).append(sampled(case.seq, entry.seconds))
    axes = Axis("tokens", "tokens"), Axis("time", "seconds")
    return Plot("Time of a forward pass, pattern of B, fp32", "lines", series_of(lines), axes)


def _rooflines(result: GpuResult) -> Iterator[Plot]:
    """One for each dtype: their ceilings differ."""
    for dtype in dict.fromkeys(case.dtype for case in result.cases):
        cases = [case for case in result.cases if case.dtype == dtype]
        work = [Work(c, c.seq * HEADS * c.head_dim * DTYPE_BYTES.get(dtype, 4), c.backward) for c in cases]
        yield roofline(f"Roofline, {dtype}: speed beside the measured matmul", work)


def _notes(result: GpuResult) -> Iterator[str]:
    """Memory, and the longest sequence."""
    for step in result.memory:
        held = (f"{name} {'?' if size is None else in_bytes(size)}" for name, size in step.scratch_bytes.items())
        yield f"A, {step.dtype}, head_dim 64: forward's memory beyond out and lse: {', '.join(held)}"
    for long in result.long:
        note = "; ".join(long.reasons)
        if long.time:
            note = f"{in_seconds(long.time.median_s)}, {(long.gflops or 0) / 1000:,.0f} TFLOP/s"
        yield f"{long.seq:,} tokens, bf16 forward: {long.verdict}: {note}"
