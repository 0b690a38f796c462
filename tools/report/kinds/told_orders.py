"""What the result of the suite of token orders says, as tables and plots."""

from __future__ import annotations

from typing import Any

from dilkit.tools.bench.orders.targets import OURS, contests, measured
from dilkit.tools.report.document import Axis, Document, Plot, Point, Table, plots, tables
from dilkit.tools.report.kinds import suite_orders_report as report
from dilkit.tools.report.points import plain, sampled, series_of, speed_up

Result = dict[str, Any]
Bars = dict[str, list[Point]]


def told(result: Result) -> Document:
    """The result as a whole."""
    near = report.near_rows(result)
    return Document(
        headline=tuple(report.headline(result)),
        tables=tables(
            Table.of("Figures beside their limits", report.figure_rows(result)),
            Table.of("All times", report.time_rows(result)),
            Table.of("Calls of order", report.call_rows(result)),
            *([Table.of("Distance to the nearest kept key", near)] if near else []),
            Table.of("Packages", report.package_rows(result)),
        ),
        plots=plots(_permutations(result), _packages(result), _near(result)),
        notes=tuple(report.notes(result)),
        method=" ".join(report.METHOD.split()),
    )


def _permutations(result: Result) -> Plot:
    bars: Bars = {}
    rows = [(title, row) for title, row in contests(result) if title.startswith("permutation")]
    packages = _names(result)
    for title, row in rows:
        for who, entry in row["entries"].items():
            if "time" in entry and who not in packages:
                bars.setdefault(who, []).append(sampled(title.removeprefix("permutation, "), _per_point(entry)))
    return Plot("Time a point of a permutation, with 95% intervals", "bars", series_of(bars), (Axis("", "number"), _NS))


_NS = Axis("nanoseconds a point", "number")


def _per_point(entry: dict[str, Any]) -> list[float]:
    """Nanoseconds a point, by sample."""
    return [1e9 * sample / entry["points"] for sample in entry["time"]["samples_s"]]


def _names(result: Result) -> set[str]:
    return {package["name"] for package in result["packages"]}


def _packages(result: Result) -> Plot:
    """How many times less time a point takes here; those that computed something wrong were not timed."""
    bars: Bars = {}
    for name in sorted(_names(result)):
        for title, row in contests(result):
            if measured(row, OURS, name):
                bars.setdefault(name, []).append(
                    speed_up(title.removesuffix(", int32"), *(_per_point(row["entries"][who]) for who in (name, OURS)))
                )
    axes = Axis("", "number"), Axis("times faster", "times")
    return Plot("Speed-up over packages, with 95% intervals", "bars", series_of(_sorted(bars)), axes, mark=1.0)


def _sorted(bars: Bars) -> Bars:
    """The package that comes closest first."""
    return dict(sorted(bars.items(), key=lambda item: min(point.y for point in item[1])))


def _near(result: Result) -> Plot:
    bars: Bars = {}
    for row in result["locality"]:
        for curve, near in row["nearest_kept"].items():
            bars[curve] = [plain(f"every {rate}th key kept", near[str(rate)]["mean"]) for rate in row["dilation_rates"]]
    axes = Axis("", "number"), Axis("mean distance, in cells", "number")
    return Plot("Distance to the nearest kept key", "bars", series_of(bars), axes)
