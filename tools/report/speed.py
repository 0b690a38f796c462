"""Speed-ups between implementations: ratios of medians with their intervals, as a table and as bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dilkit.tools.report.document import Axis, Plot, Point, Table
from dilkit.tools.report.points import series_by_name, speed_up
from dilkit.tools.results.record import Case

HEADER = ("configuration", "over", "speed-up", "95% interval")


def faster(cases: Iterable[tuple[str, Case]], ours: str, other: str) -> list[tuple[str, Point]]:
    """(the other, a bar) for each titled case that has both: how many times faster ours is."""
    return [
        (other, speed_up(title, case.entries[other].seconds, case.entries[ours].seconds))
        for title, case in cases
        if case.timed(ours, other)
    ]


def speed_up_table(ours: str, found: Iterable[tuple[str, Point]]) -> Table:
    """A row for each speed-up of ours."""
    rows = tuple((str(p.x), other, f"{p.y:.2f}x", interval(p)) for other, p in found)
    return Table(f"Speed-up of {ours}", HEADER, rows, "Ratios of medians; intervals by resampling each side's samples.")


def interval(point: Point) -> str:
    """The interval of a ratio."""
    return f"{point.low:.2f}x - {point.high:.2f}x"


def speed_up_bars(ours: str, found: Sequence[tuple[str, Point]]) -> list[Plot]:
    """A plot for each of the others, with a bar for each case."""
    axes = Axis("", "number"), Axis("times faster", "times")
    return [
        Plot(f"Speed-up of {ours} over {one.name}, with 95% intervals", "bars", (one,), axes, mark=1.0)
        for one in series_by_name(found)
    ]
