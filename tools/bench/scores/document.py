"""What the result of the suite of scores says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dilkit.tools.bench.scores.record import OURS, PLAIN, ScoresCase, ScoresResult
from dilkit.tools.console.text import in_bytes, in_seconds
from dilkit.tools.report.document import Axis, Document, Plot, Table, plots, tables
from dilkit.tools.report.entries import grouped, quartiles, reasons, times_as_long
from dilkit.tools.report.headline import suite_headline
from dilkit.tools.report.points import plain, sampled, series_by_name
from dilkit.tools.report.targets import figure_table, suite_sentence

SENTENCES = {
    "a slide, dense with 2-D ALiBi: time of torch with a matrix over dilkit's": (
        "a slide with 2-D ALiBi by torch with a matrix takes {} as long as by dilkit"
    ),
    "a layer with a softcap: time of eager torch over dilkit's": (
        "a layer with a softcap by eager torch takes {} as long as by dilkit"
    ),
    "forward, ALiBi: time over that without a bias": "ALiBi costs {} the time without a bias",
}
"""Figures by name, and the words that docs/measurements.md has for the worst value of each."""
METHOD = (
    "fp32; times are medians of samples taken in turns. Before it is timed, every way is compared with the definition in fp64: "
    "all results at a short length, and random rows at full length. Slopes and tables are learned where there is a backward "
    "pass. torch's matrix of all pairs is made from slopes and coordinates in the call, as dilkit's distances are, or before; it "
    "takes so much memory that there are few heads. Eager torch multiplies, caps, masks and weighs in operators of their own. "
    "Memory is the most that a call held beside its inputs, by the high-water mark of the process, with the matrix where there "
    "is one."
)
_NAMES, _SECONDS, _BYTES = Axis("", "number"), Axis("time", "seconds"), Axis("memory beside the inputs", "bytes")


def sentence(result: ScoresResult) -> str:
    """For README.md."""
    return suite_sentence(result, SENTENCES)


def document(result: ScoresResult) -> Document:
    """All figures, times and bytes."""
    at = result.environment
    place = f"{at.device_name}, instruction set {result.isa}, {result.thread_count} threads of {at.cores} cores"
    beside = (*result.tiles, *result.layers)
    return Document(
        headline=suite_headline(result, place),
        tables=tables(
            figure_table(result.figures),
            _table("Biases", result.kinds, PLAIN),
            _table("A slide", result.tiles, OURS),
            _table("A layer", result.layers, OURS),
        ),
        plots=plots(_times("biases", result.kinds), _times("beside torch", beside), _memory("beside torch", beside)),
        notes=tuple(grouped(reasons(result.titled()))),
        method=METHOD,
    )


def _table(title: str, cases: Sequence[ScoresCase], base: str) -> Table:
    header = ("what", "who", "time", "quartiles", "samples", f"over {base}", "memory")
    note = "; ".join(f"{case.what}: {problem}" for case in cases for problem in case.problems)
    return Table(title, header, tuple(row for case in cases for row in _rows(case, base)), note)


def _rows(case: ScoresCase, base: str) -> Iterator[tuple[str, ...]]:
    for name, entry in case.entries.items():
        if entry.time:
            time = in_seconds(entry.time.median_s), quartiles(entry.time), str(len(entry.seconds))
            yield case.what, name, *time, times_as_long(case, name, base), in_bytes(entry.peak_bytes)


def _times(title: str, cases: Sequence[ScoresCase]) -> Plot:
    bars = ((name, sampled(case.what, entry.seconds)) for case in cases for name, entry in case.entries.items() if entry.time)
    return Plot(f"Time: {title}", "bars", series_by_name(bars), (_NAMES, _SECONDS))


def _memory(title: str, cases: Sequence[ScoresCase]) -> Plot:
    sizes = [(name, case.what, entry.peak_bytes) for case in cases for name, entry in case.entries.items()]
    bars = ((name, plain(what, size)) for name, what, size in sizes if size)
    return Plot(f"Memory: {title}", "bars", series_by_name(bars), (_NAMES, _BYTES))
