"""The axes of a drawn plot: scales, round ticks, and numbers written in their unit."""

from __future__ import annotations

import math
from typing import Any

from dilkit.tools.report.document import Axis, Plot
from dilkit.tools.report.units import UNITS

MOST_TICKS = 7
FAR_APART = 60
"""The largest over the least ratio of bars that are drawn on a linear axis."""
_DECADE = ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))
_OCTAVE = ((1, 1.25, 1.5, 1.75), (1,))


def scale(axes: Any, name: str, axis: Axis, ticks: list[float], color: str, most: int = MOST_TICKS) -> None:
    """Make the axis of this `name`, "x" or "y", what `axis` says; with these ticks, or at `most` so many round ones."""
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    one, binary = getattr(axes, f"{name}axis"), axis.unit in ("bytes", "tokens")
    if axis.log:
        getattr(axes, f"set_{name}scale")("log", base=2 if binary else 10)
        low, high = one.get_view_interval()
        one.set_ticks(ticks or log_ticks(low, high, binary, most))
        one.minorticks_off()
    else:
        if name == "y":
            axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        high = one.get_view_interval()[1]
        one.set_major_locator(MultipleLocator(2.0 ** math.ceil(math.log2(high / 5))) if axis.unit == "bytes" else MaxNLocator(5))
    one.set_major_formatter(lambda value, _: UNITS[axis.unit](value))
    one.set_label_text(axis.title, color=color)


def log_ticks(low: float, high: float, binary: bool = False, most: int = MOST_TICKS) -> list[float]:
    """Round numbers from `low` to `high`, two to `most` of them: the more the axis spans, the fewer in a decade or octave."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    base, factors = (2.0, _OCTAVE) if binary else (10.0, _DECADE)
    for locator in (*(LogLocator(base, few, numticks=most) for few in factors), MaxNLocator(most - 1)):
        ticks = [float(tick) for tick in locator.tick_values(low, high) if low <= tick <= high]
        if 2 <= len(ticks) <= most:
            break
    return ticks


def bar_ends(plot: Plot, foot: float) -> tuple[float, float]:
    """The ends of the axis along bars: room for the values behind them."""
    points = [p for series in plot.series for p in series.points]
    low, high = min([foot, *(p.low for p in points)]), max([foot, *(p.high for p in points)])
    if foot:
        return low, high * (high / low) ** 0.25
    return low, high + 0.2 * ((high - low) or 1.0)


def bar_foot(plot: Plot) -> float:
    """Where bars begin: at 0; of ratios that lie far apart, on a logarithmic axis, at the mark."""
    low, high = ([getattr(p, name) for series in plot.series for p in series.points] for name in ("low", "high"))
    apart = min(low, default=0.0) > 0 and max(high) > FAR_APART * min(low)
    return plot.mark if apart and plot.mark is not None else 0.0
