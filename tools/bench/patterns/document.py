"""What the result of the suite of patterns says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dilkit.tools.bench.patterns.record import OURS, PatternCase, PatternsResult
from dilkit.tools.console.text import in_bytes, in_seconds
from dilkit.tools.report.document import Axis, Document, Plot, Table, plots, tables
from dilkit.tools.report.entries import grouped, quartiles, reasons, times_as_long
from dilkit.tools.report.headline import suite_headline
from dilkit.tools.report.points import plain, rate, sampled, series_by_name
from dilkit.tools.report.targets import figure_table, number, suite_sentence

HEADER = ("what", "who", "time", "quartiles", "samples", f"over {OURS}", "GFLOP/s", "memory", "with inputs")
SENTENCES = {
    "a window: time of FlexAttention, compiled, over dilkit's": "a sliding window by FlexAttention takes {} as long as by dilkit",
    "window, global tokens and segments: time of three calls, merged, over one pass": (
        "window, global tokens and segments in three calls take {} as long as in one pass"
    ),
    "BigBird: time of torch's attention with a mask over dilkit's": "BigBird by torch with a mask takes {} as long as by dilkit",
    "a window and global tokens: memory of a million tokens": "a million tokens of a window with global tokens hold {}",
}
"""Figures by name, and the words that docs/measurements.md has for the worst value of each."""
METHOD = (
    "fp32, forward but where it says more; times are medians of samples taken in turns. Before it is timed, every way is "
    "compared with the definition in fp64, in the first row and random others. FlexAttention is compiled for the one shape, and "
    "looks only at blocks in which the window lies; what compiling takes is not counted. Three calls: one for each kind of "
    "branch, by the same kernel, merged by their logsumexps with torch. Rates are nominal FLOPs, four times head_dim for each "
    "pair of query and key that is seen, over time; the segments are as long as the span of the window, and at the ends of the "
    "sequence the window has less. torch's attention with a mask computes all pairs; its mask takes so much memory and time "
    "that there are few heads. The mask is made before it is timed. Blocks of each call: each block of queries is given so many "
    "blocks at random, all heads the same; a new layout has the same blocks in another order, in a tensor of other numbers. "
    "Memory is the most that a call held beside its inputs, by the high-water mark of the process, with the mask where there is "
    "one."
)
_NAMES, _SECONDS, _BYTES = Axis("", "number"), Axis("time", "seconds"), Axis("memory beside the inputs", "bytes")
_RATE = Axis("GFLOP/s", "number", log=False)


def sentence(result: PatternsResult) -> str:
    """For README.md."""
    return suite_sentence(result, SENTENCES)


def document(result: PatternsResult) -> Document:
    """All figures, times and bytes."""
    at = result.environment
    place = f"{at.device_name}, instruction set {result.isa}, {result.thread_count} threads of {at.cores} cores"
    return Document(
        headline=suite_headline(result, place),
        tables=tables(
            figure_table(result.figures),
            _table("A sliding window", result.windows),
            _table("A window, global tokens and segments", result.mixes),
            _table("BigBird", result.blocks),
            _table("Blocks of each call, forward and backward", result.layouts),
            _table("A window beside segments", result.rates),
            _table("A short and a long sequence", result.lengths),
        ),
        plots=plots(
            _times("a sliding window", result.windows),
            _times("window, global tokens, segments", result.mixes),
            _times("BigBird", result.blocks),
            _memory("BigBird", result.blocks),
            _times("blocks of each call, forward and backward", result.layouts),
            _rates((*result.rates, *result.lengths)),
        ),
        notes=tuple(grouped(reasons(result.titled()))),
        method=METHOD,
    )


def _table(title: str, cases: Sequence[PatternCase]) -> Table:
    note = "; ".join(f"{case.what}: {problem}" for case in cases for problem in case.problems)
    return Table(title, HEADER, tuple(row for case in cases for row in _rows(case)), note)


def _rows(case: PatternCase) -> Iterator[tuple[str, ...]]:
    for name, entry in case.entries.items():
        if entry.time:
            time = in_seconds(entry.time.median_s), quartiles(entry.time), str(len(entry.seconds))
            memory = (in_bytes(entry.peak_bytes), in_bytes(entry.memory_bytes))
            yield case.what, name, *time, times_as_long(case, name, OURS), number(case.gflops(name)), *memory


def _times(title: str, cases: Sequence[PatternCase]) -> Plot:
    bars = ((name, sampled(case.what, entry.seconds)) for case in cases for name, entry in case.entries.items() if entry.time)
    return Plot(f"Time: {title}", "bars", series_by_name(bars), (_NAMES, _SECONDS))


def _memory(title: str, cases: Sequence[PatternCase]) -> Plot:
    bars = (
        (name, plain(case.what, entry.peak_bytes))
        for case in cases
        for name, entry in case.entries.items()
        if entry.peak_bytes
    )  # fmt: skip
    return Plot(f"Memory: {title}", "bars", series_by_name(bars), (_NAMES, _BYTES))


def _rates(cases: Sequence[PatternCase]) -> Plot:
    bars = (
        (OURS, rate(name, (entry.flops or 0.0) / 1e9, entry.seconds))
        for case in cases
        for name, entry in case.entries.items()
        if entry.time
    )
    return Plot("Nominal rate", "bars", series_by_name(bars), (_NAMES, _RATE))
