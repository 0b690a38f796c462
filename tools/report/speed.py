"""Speed-ups between implementations."""

from __future__ import annotations

from dilkit.tools.report.document import Point


def interval(point: Point) -> str:
    """The interval of a ratio."""
    return f"{point.low:.2f}x - {point.high:.2f}x"
