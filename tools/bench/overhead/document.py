"""What the result of `dilkit bench --overhead` says."""

from __future__ import annotations

from dilkit.tools.bench.overhead.record import Calls, OverheadResult
from dilkit.tools.console.text import in_seconds
from dilkit.tools.report.document import Axis, Document, Plot, Point, Series, Table, plots, tables
from dilkit.tools.report.headline import place, placed
from dilkit.tools.report.points import sampled
from dilkit.tools.results.record import Samples

METHOD = "One thread; both ways timed in turns. The overhead is the median difference of samples of the same round."


def sentence(result: OverheadResult) -> str:
    """For README.md."""
    overheads = [f"{1e6 * calls.overhead_s:.1f} us ({mode})" for mode, calls in result.modes.items()]
    return placed(result, f"`dilated_attention` adds to a call of its backend, {result.backend}: {', '.join(overheads)}")


def document(result: OverheadResult) -> Document:
    """Times of both ways, and the differences."""
    sizes = result.problem.text(f"{result.seq} tokens").partition(", ")[2]  # the passes are those of each row
    header = ("a call", "dilkit", "directly", "overhead", "of the fastest")
    rows = tuple((mode, *_cells(calls)) for mode, calls in result.modes.items())
    public = Series("dilkit.dilated_attention", _bars({mode: calls.public for mode, calls in result.modes.items()}))
    direct = Series(f"{result.backend} directly", _bars({mode: calls.direct for mode, calls in result.modes.items()}))
    axes = Axis("", "number"), Axis("time of a call", "seconds", log=False)
    return Document(
        headline=(
            f"selection + op overhead of dilkit.dilated_attention over backend {result.backend} called directly",
            f"{sizes}, {result.problem.pattern.text}",
            place(result),
        ),
        tables=tables(Table("Time of a call", header, rows)),
        plots=plots(Plot("Time of a call, with 95% intervals", "bars", (public, direct), axes)),
        method=METHOD,
    )


def _bars(timed: dict[str, Samples]) -> tuple[Point, ...]:
    return tuple(sampled(mode, samples.samples_s) for mode, samples in timed.items())


def _cells(calls: Calls) -> tuple[str, ...]:
    times = calls.public.median_s, calls.direct.median_s, calls.overhead_s, calls.overhead_of_fastest_s
    return tuple(f"-{in_seconds(-time)}" if time < 0 else in_seconds(time) for time in times)
