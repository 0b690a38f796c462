"""What the result of the suite of serving says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dilkit.tools.bench.serving.record import (
    CACHE,
    DILATED,
    OURS,
    PACKED,
    PAGED,
    Decoding,
    Generated,
    ManySequences,
    PackedCase,
    Prefill,
    ServingResult,
)
from dilkit.tools.console.text import in_bytes, in_seconds
from dilkit.tools.report.document import Axis, Document, Plot, Series, Table, plots, tables
from dilkit.tools.report.entries import grouped, quartiles, reasons, times_as_long
from dilkit.tools.report.headline import suite_headline
from dilkit.tools.report.points import plain, sampled, series_by_name
from dilkit.tools.report.targets import figure_table, number, suite_sentence

Timed = PackedCase | Prefill | ManySequences | Generated
TIMES = ("what", "who", "time", "quartiles", "samples", "over {}", "peak memory")
STEPS = ("seen", "who", "time of a step", "quartiles", "samples", f"over {CACHE}")
BYTES = ("seen", "kept", "allocated", "bound", "a full cache", "full / allocated")
SENTENCES = {
    "packed sequences, forward + backward: time over one by one": "packed sequences take {} as long as one by one",
    "a step over a full cache by torch: time over that of DilatedCache": (
        "a step of decoding by torch over a full cache takes {} as long as with a DilatedCache"
    ),
    "a step of DilatedCache: time after a million tokens over that after a thousand": (
        "a step with a DilatedCache takes {} as long after a million tokens as after a thousand"
    ),
    "prefill of a Llama-shaped model: time of torch's dense attention over dilkit's": (
        "prefill of a Llama-shaped model takes {} as long with torch's dense attention as with dilkit"
    ),
}
"""Figures by name, and the words that docs/measurements.md has for the worst value of each."""
METHOD = (
    "fp32; times are medians of samples taken in turns. Before it is timed, everyone is compared with another way to compute "
    "the same. Packed: sequences one by one get a call each, and no time is spent on cutting them out; those padded to the "
    "longest get a mask, or none: under causality no row sees the padding behind it. Decoding: a sample is several steps in a "
    "row, all points are timed in the same rounds, and the steps are taken back between samples. Every token seen was attended "
    "to, in rows of random numbers. torch's attention sees all keys, in a cache of its own layout to which new ones are written "
    "in place; dilated_attention_with_kvcache sees those of the pattern. Segments are full where they end, in all branches, one "
    "token after the steps: there a row sees the most. Memory of a DilatedCache is compared with the bound of docs/decoding.md. "
    "On one thread: reading what is kept is torch's sum over as many bytes, again and again, as steps read them; a step may "
    "take less, because it reads a row that several branches keep once. Steps of many sequences are of one more token each "
    "time. A model of transformers, with random weights, had read "
    "all tokens but one, which is not timed; its own cache keeps them all. Prefill: a model of Llama's shape with random "
    "weights, up to the logits of the last token; dense attention in the place of dilkit's computes another function, and "
    "without attention it is the time of all else. Peak memory is the most that a call held beside weights and inputs, by the "
    "high-water mark of the process."
)
_NAMES, _SEEN = Axis("", "number"), Axis("tokens seen", "tokens")
_SECONDS, _BYTES = Axis("time", "seconds"), Axis("memory", "bytes")


def sentence(result: ServingResult) -> str:
    """For README.md."""
    return suite_sentence(result, SENTENCES)


def document(result: ServingResult) -> Document:
    """All figures, times and bytes."""
    at = result.environment
    place = f"{at.device_name}, instruction set {result.isa}, {result.thread_count} threads of {at.cores} cores"
    decoded = [part for decoding in result.decoding for part in (_steps(decoding), _bytes(decoding))]
    decoded += [_steps(decoding, "Decoding on one thread") for decoding in result.single]
    decoded += [_times("A step of many sequences, one thread", result.many, PAGED)] if result.many else []
    decoded += [_times("Tokens of a model of transformers, one thread", result.generated, DILATED)] if result.generated else []
    drawn = (part for decoding in result.decoding for part in (_step_plot(decoding), _bytes_plot(decoding)))
    packed = _times("Packed sequences, causal, forward and backward", result.packed, PACKED)
    prefill = _times("Prefill", result.prefill, OURS)
    return Document(
        headline=suite_headline(result, place),
        tables=tables(figure_table(result.figures), packed, *decoded, prefill),
        plots=plots(*drawn, _bars("Time of packed sequences", result.packed), _bars("Time of prefill", result.prefill)),
        notes=tuple(grouped(reasons(result.titled()))),
        method=METHOD,
    )


def _times(title: str, cases: Sequence[Timed], ours: str) -> Table:
    header = tuple(cell.format(ours) for cell in TIMES)
    note = "; ".join(dict.fromkeys(f"dilkit's attention: {case.pattern}" for case in cases))
    return Table(title, header, tuple(_time_rows(cases, ours)), note)


def _time_rows(cases: Sequence[Timed], ours: str) -> Iterator[tuple[str, ...]]:
    for case in cases:
        for name, entry in case.entries.items():
            if entry.time:
                time = in_seconds(entry.time.median_s), quartiles(entry.time), str(len(entry.seconds))
                yield case.title, name, *time, times_as_long(case, name, ours), in_bytes(entry.peak_bytes)


def _steps(decoding: Decoding, title: str = "Decoding") -> Table:
    rows = (
        (point.title, name, in_seconds(entry.time.median_s), quartiles(entry.time), str(len(entry.seconds)),
         times_as_long(point, name, CACHE))
        for point in decoding.points
        for name, entry in point.entries.items()
        if entry.time
    )  # fmt: skip
    note = f"{decoding.heads} heads of {decoding.head_dim}, {decoding.pattern}; {decoding.steps} steps in a sample"
    return Table(title, STEPS, tuple(rows), note)


def _bytes(decoding: Decoding) -> Table:
    rows = (
        (
            point.title,
            *map(in_bytes, (point.kept_bytes, point.allocated_bytes, point.bound_bytes, point.full_bytes)),
            number(point.full_bytes / point.allocated_bytes),
        )
        for point in decoding.points
    )
    return Table(f"Memory of a {CACHE}", BYTES, tuple(rows))


def _step_plot(decoding: Decoding) -> Plot:
    times = (
        (name, sampled(point.seen, entry.seconds))
        for point in decoding.after()
        for name, entry in point.entries.items()
        if entry.time
    )
    return Plot("Time of a step of decoding", "lines", series_by_name(times), (_SEEN, _SECONDS))


def _bytes_plot(decoding: Decoding) -> Plot:
    points = decoding.after()
    lines = (
        Series(CACHE, tuple(plain(point.seen, point.allocated_bytes) for point in points)),
        Series("a full cache", tuple(plain(point.seen, point.full_bytes) for point in points)),
        Series("the bound", tuple(plain(point.seen, point.bound_bytes) for point in points), dashed=True),
    )
    return Plot("Memory of a cache", "lines", lines, (_SEEN, _BYTES))


def _bars(title: str, cases: Sequence[PackedCase | Prefill]) -> Plot:
    times = (
        (name, sampled(case.label, entry.seconds)) for case in cases for name, entry in case.entries.items() if entry.time
    )  # fmt: skip
    return Plot(title, "bars", series_by_name(times), (_NAMES, _SECONDS))
