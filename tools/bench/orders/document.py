"""What the result of the suite of token orders says."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from dilkit.tools.bench.orders.record import OURS, OrdersResult, size
from dilkit.tools.console.text import in_seconds
from dilkit.tools.report.document import Axis, Document, Plot, Table, plots, tables
from dilkit.tools.report.entries import grouped
from dilkit.tools.report.headline import suite_headline
from dilkit.tools.report.points import plain, sampled, series_by_name, speed_up
from dilkit.tools.report.targets import figure_table, number, suite_sentence

TIMES = ("what", "who", "ns a point", "quartiles", "samples", "points", "time / dilkit's")
CALLS = ("grid", "cold", "ns a point", "cold, with ranks", "ns a point", "warm")
PACKAGES = ("package", "version", "what it computes", "")
SENTENCES = {
    "2-D Hilbert, 1024 x 1024": "the Hilbert order of 1024 x 1024 tokens takes {}",
    "generalised Hilbert, 33 x 45 x 80": "that of 33 x 45 x 80 {}",
    "a warm order(...), from the cache": "one that is in the cache {}",
    "time of hilbertsfc over dilkit's, the least of all rows": "hilbertsfc, the fastest other package, at least {} as long",
}
"""Figures by name, and the words that docs/measurements.md has for the worst value of each."""
METHOD = (
    "Medians of all samples, on one thread, everyone in a row timed in turns; a sample is as many calls as last 20 ms, and "
    "a ratio the median of those within a round. dilkit's permutations, ranks and codes go into arrays that were written to "
    "before; the store loop is out[i] = i, compiled with the same flags, into the same array as dilkit's permutation. A "
    "cold call of order finds an empty cache and gets fresh memory from the system, page faults included. A package that "
    "would take longer than the budget (--budget, seconds a call) is given fewer points of the same row; what counts is "
    "time a point. Packages have codes and coordinates on cubes of a power of two: their permutation is that of decoded "
    "coordinates, their ranks are the codes of all cells, and on other grids their codes are sorted, which makes a curve "
    "with jumps. Before it is timed, everyone is checked: on a small grid each cell must be visited once, by steps of one "
    "cell, and codes and cells must be each other's inverse; in the row itself, each cell must occur once, codes must "
    "ascend, or the inputs must come back. Distances to the nearest kept key are means over the tokens of a grid of 256 x "
    "256 in segments of 4,096, and depend on no machine."
)
_NS, _NAMES = Axis("nanoseconds a point", "number"), Axis("", "number")


def sentence(result: OrdersResult) -> str:
    """For README.md."""
    return suite_sentence(result, SENTENCES)


def document(result: OrdersResult) -> Document:
    """All figures, times, calls of `order`, distances and packages."""
    at = result.environment
    place = f"{at.device_name}, one thread, encode and decode with {result.isa}"
    packages = ((p.name, p.version or "-", p.summary, p.absent or "took part") for p in result.packages)
    return Document(
        headline=suite_headline(result, place, f"Python {at.python}, numpy {at.numpy}", "sides", "time"),
        tables=tables(
            figure_table(result.figures),
            Table("All times", TIMES, tuple(_time_rows(result))),
            Table("Calls of order", CALLS, tuple(_call_rows(result))),
            *_near_tables(result),
            Table("Packages", PACKAGES, tuple(packages)),
        ),
        plots=plots(_permutations(result), _speed_ups(result), _near(result)),
        notes=tuple(_notes(result)),
        method=METHOD,
    )


def _time_rows(result: OrdersResult) -> Iterator[tuple[str, ...]]:
    for case in result.cases:
        for name, entry in case.entries.items():
            if entry.time:
                scale, ratio = 1e9 / entry.points, case.over(name)
                quartiles = f"{number(entry.time.q1_s * scale)} - {number(entry.time.q3_s * scale)}"
                cells = number(entry.time.median_s * scale), quartiles, str(len(entry.ns)), f"{entry.points:,}"
                yield case.title, name, *cells, "-" if ratio is None else number(ratio)


def _call_rows(result: OrdersResult) -> Iterator[tuple[str, ...]]:
    warm = {row.grid: in_seconds(row.time.median_s) for row in result.warm if row.time}
    for row in result.cold:
        medians = [row.times[what].median_s for what in ("permutation", "both")]
        cells = [cell for median in medians for cell in (in_seconds(median), number(1e9 * median / prod(row.shape)))]
        yield size(row.shape), *cells, warm.get(row.grid, "-")


def _near_tables(result: OrdersResult) -> Iterator[Table]:
    """The mean distance, and the largest."""
    for row in result.locality:
        shown = {c: [near[str(rate)] for rate in row.dilation_rates] for c, near in row.nearest_kept.items()}
        rows = tuple((curve, *(f"{near.mean:.3f} ({near.max:.3g})" for near in found)) for curve, found in shown.items())
        header = ("curve", *(f"every {rate}th key kept" for rate in row.dilation_rates))
        yield Table("Distance to the nearest kept key", header, rows)


def _permutations(result: OrdersResult) -> Plot:
    packages = {package.name for package in result.packages}
    bars = (
        (name, sampled(case.title.removeprefix("permutation, "), entry.ns))
        for case in result.permutations
        for name, entry in case.entries.items()
        if entry.time and name not in packages
    )
    return Plot("Time a point of a permutation, with 95% intervals", "bars", series_by_name(bars), (_NAMES, _NS))


def _speed_ups(result: OrdersResult) -> Plot:
    """Over each package, the one that comes closest first; those that computed something wrong were not timed."""
    bars = (
        (name, speed_up(case.title.removesuffix(", int32"), case.entries[name].ns, case.entries[OURS].ns))
        for name in sorted(package.name for package in result.packages)
        for case in result.cases
        if case.over(name) is not None
    )
    closest = tuple(sorted(series_by_name(bars), key=lambda series: min(point.y for point in series.points)))
    axes = _NAMES, Axis("times faster", "times")
    return Plot("Speed-up over packages, with 95% intervals", "bars", closest, axes, mark=1.0)


def _near(result: OrdersResult) -> Plot:
    bars = (
        (curve, plain(f"every {rate}th key kept", near[str(rate)].mean))
        for row in result.locality
        for curve, near in row.nearest_kept.items()
        for rate in row.dilation_rates
    )
    axes = _NAMES, Axis("mean distance, in cells", "number")
    return Plot("Distance to the nearest kept key", "bars", series_by_name(bars), axes)


def _notes(result: OrdersResult) -> Iterator[str]:
    """Who was wrong or failed, in what and where; how much was checked."""
    yield from grouped(
        (f"{name} {entry.verdict}, not ranked: {reason}", case.title)
        for case in result.cases
        for name, entry in case.entries.items()
        for reason in entry.reasons[:1]
    )
    checks = sum(len(entry.check) for case in result.cases for entry in case.entries.values())
    yield f"{checks} checks of results, each just before its timing"
