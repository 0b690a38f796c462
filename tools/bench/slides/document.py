"""What the result of the suite of slides says."""

from __future__ import annotations

from collections.abc import Iterator

from dilkit.tools.bench.slides.record import OURS, SlidesResult, listed, what
from dilkit.tools.console.text import in_bytes, in_seconds
from dilkit.tools.report.document import Axis, Document, Plot, Table, plots, tables
from dilkit.tools.report.entries import grouped, quartiles, reasons
from dilkit.tools.report.headline import suite_headline
from dilkit.tools.report.points import plain, rate, sampled, series_by_name
from dilkit.tools.report.targets import figure_table, number, suite_sentence
from dilkit.tools.results.record import Case

TIMES = ("what", "layers", "who", "time", "quartiles", "samples", "peak memory")
ONCE = ("what", "time", "memory beside weights and inputs", "weights and inputs")
DIMS = ("backend", "head_dim", "time", "GFLOP/s", "of matmul", "rate / that at the largest head_dim")
SENTENCES = {
    "one slide, forward: time of the published procedure over dilkit's": (
        "GigaPath's slide encoder by its published procedure takes {} as long as by dilkit"
    ),
    "one slide, forward: peak memory of the published procedure over dilkit's": "and {} of the memory",
    "a long slide: memory in all": "a slide of 100,000 tiles needs {} in all",
}
"""Figures by name, and the words that docs/measurements.md has for the worst value of each."""
METHOD = (
    "{} with random weights, fp32, forward without gradients. The published procedure is written out in plain PyTorch, with the "
    "same weights: for each branch queries, keys and values are padded with zeros to whole segments, kept rows gathered, "
    "attended to by torch's flash attention for CPUs (what scaled_dot_product_attention runs, called so that it gives the "
    "denominators of the softmax too), and scattered into zeros; the branches are weighted by their denominators, and every "
    "layer takes all rows at once. Both embeddings are compared first. Times are medians of samples taken in turns. Peak memory "
    "is the most that a call held beside weights and inputs, by the high-water mark of the process. Slides of different "
    "lengths in one batch are packed: tiles that are masked are left out before the first layer, and attention takes slide by "
    "slide. Long slides and attention_mass are measured once. GFLOP/s count the pattern's nominal FLOPs; a backend that padded "
    "48 numbers of a head to 64 would reach 0.75 of its rate at 64 at most."
)
_NAMES, _SECONDS, _BYTES = Axis("", "number"), Axis("time", "seconds"), Axis("peak memory", "bytes")


def sentence(result: SlidesResult) -> str:
    """For README.md."""
    return suite_sentence(result, SENTENCES)


def document(result: SlidesResult) -> Document:
    """All figures, times and memory."""
    at = result.environment
    place = f"{at.device_name}, instruction set {result.isa}, {result.thread_count} threads of {at.cores} cores"
    return Document(
        headline=suite_headline(result, place),
        tables=tables(
            figure_table(result.figures),
            Table("One slide, and several", TIMES, tuple(_time_rows(result))),
            Table("Long slides", ONCE, tuple(_once_rows(result))),
            Table("Attention of a layer, by head_dim", DIMS, tuple(_dim_rows(result))),
        ),
        plots=plots(*_times(result), _memory(result), _rates(result)),
        notes=tuple(_notes(result)),
        method=METHOD.format(result.architecture),
    )


def _time_rows(result: SlidesResult) -> Iterator[tuple[str, ...]]:
    for case in (*result.encoder, *result.several):
        for name, entry in case.entries.items():
            if entry.time:
                time = in_seconds(entry.time.median_s), quartiles(entry.time), str(len(entry.seconds))
                yield listed(case.tiles), str(case.depth), name, *time, in_bytes(entry.peak_bytes)


def _once_rows(result: SlidesResult) -> Iterator[tuple[str, ...]]:
    for row in result.long:
        memory = in_bytes(row.peak_bytes), in_bytes(row.held_bytes)
        yield f"{what(row)}, {listed([row.tiles])}", in_seconds(row.time.median_s), *memory
    for mass in result.mass:
        memory = in_bytes(mass.peak_bytes), in_bytes(2 * mass.output_bytes)
        yield f"attention_mass, {listed([mass.tiles])}", in_seconds(mass.time.median_s), *memory


def _dim_rows(result: SlidesResult) -> Iterator[tuple[str, ...]]:
    for case in result.head_dims:
        for name, entry in case.entries.items():
            if entry.time:
                largest = max(result.head_dims, key=lambda other: other.head_dim).entries[name].gflops
                share = number((entry.gflops or 0) / largest) if largest else "-"
                speed = f"{entry.gflops or 0:,.0f}", f"{entry.matmul_fraction or 0:.0%}", share
                yield name, str(case.head_dim), in_seconds(entry.time.median_s), *speed


def _times(result: SlidesResult) -> Iterator[Plot]:
    for what_for, cases in (("one slide", result.encoder), ("several slides", result.several)):
        for case in cases:
            bars = ((name, sampled(listed(case.tiles), entry.seconds)) for name, entry in case.entries.items() if entry.time)
            title = f"Time of {what_for}, {case.depth} layers"
            yield Plot(title, "bars", series_by_name(bars), (_NAMES, _SECONDS))


def _memory(result: SlidesResult) -> Plot:
    bars = [
        (name, plain(listed(case.tiles), entry.peak_bytes))
        for case in result.encoder
        for name, entry in case.entries.items()
        if entry.peak_bytes
    ]
    bars += [(OURS, plain(listed([row.tiles]), row.peak_bytes)) for row in result.long if row.peak_bytes and not row.gradients]
    return Plot("Peak memory beside weights and inputs", "bars", series_by_name(bars), (_NAMES, _BYTES))


def _rates(result: SlidesResult) -> Plot:
    bars = (
        (f"head_dim {case.head_dim}", rate(name, (entry.flops or 0) / 1e9, entry.seconds))
        for case in result.head_dims
        for name, entry in case.entries.items()
        if entry.time
    )
    axes = _NAMES, Axis("GFLOP/s", "number")
    return Plot("Attention of a layer, nominal rate", "bars", series_by_name(bars), axes)


def _notes(result: SlidesResult) -> Iterator[str]:
    """Who was not timed and why, and what could not be measured."""
    cases: list[tuple[str, Case]] = [(f"head_dim {case.head_dim}", case) for case in result.head_dims]
    cases += [(listed(case.tiles), case) for case in (*result.encoder, *result.several)]
    yield from grouped(reasons(cases))
    yield from (f"wrong: {row.check.complaint}" for row in result.mass if not row.check.passed)
    once = [(row.why, row.tiles) for row in result.long] + [(row.why, row.tiles) for row in result.mass]
    yield from grouped((why, listed([tiles])) for why, tiles in once if why)
