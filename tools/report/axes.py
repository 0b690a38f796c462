"""The axes of a drawn plot: scales, round ticks, and numbers written in their unit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dilkit.tools.report.document import Axis, Plot
from dilkit.tools.report.units import UNITS

MOST_TICKS = 7
FAR_APART = 60
"""The largest over the least ratio of bars that are drawn on a linear axis."""


def scale(axes: Any, name: str, axis: Axis, ticks: list[float], color: str, most: int = MOST_TICKS) -> None:
    """Make the axis of this `name`, "x" or "y", what `axis` says; with these ticks, or at `most` so many round ones."""
    one = getattr(axes, f"{name}axis")
    if axis.log:
        getattr(axes, f"set_{name}scale")("log", base=2 if axis.unit in ("bytes", "tokens") else 10)
        low, high = getattr(axes, f"get_{name}lim")()
        one.set_ticks(ticks or log_ticks(low, high, binary=axis.unit in ("bytes", "tokens"), most=most))
        one.minorticks_off()
    else:
        if name == "y":
            axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        one.set_major_locator(few_ticks(axis))
    one.set_major_formatter(formatter(axis))
    getattr(axes, f"set_{name}label")(axis.title, color=color)


def formatter(axis: Axis) -> Callable[[float, int], str]:
    """What writes numbers along an axis."""
    return lambda value, _: UNITS[axis.unit](value)


def few_ticks(axis: Axis) -> Any:
    """What places about five round ticks on an axis that is not logarithmic."""
    from matplotlib.ticker import MaxNLocator

    class Binary(MaxNLocator):
        """Steps of a power of two."""

        def tick_values(self, vmin: float, vmax: float) -> Any:
            step = 2.0 ** math.ceil(math.log2(max(vmax - vmin, 8.0) / 5))
            return [i * step for i in range(math.ceil(vmin / step), math.floor(vmax / step) + 1)]

    return Binary() if axis.unit == "bytes" else MaxNLocator(nbins=5)


def log_ticks(low: float, high: float, binary: bool = False, most: int = MOST_TICKS) -> list[float]:
    """Round numbers from `low` to `high`, two to `most` of them: the more the axis spans, the fewer in a decade or octave."""
    base, factors = (2.0, _OCTAVES) if binary else (10.0, _DECADES)
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    fine = ([factor * base**power for power in powers for factor in few] for few in factors)
    coarse = ([base**power for power in powers if power % every == 0] for every in range(1, len(powers) + 1))
    inside: list[float] = []
    for ticks in (*fine, *coarse):
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= most:
            break
    return inside if len(inside) > 1 else _even_ticks(low, high, base, most)


_DECADES = ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3))
_OCTAVES = ((1, 1.25, 1.5, 1.75),)


def _even_ticks(low: float, high: float, base: float, most: int) -> list[float]:
    """Multiples of a power of `base`: for an axis that spans next to nothing."""
    step = base ** math.floor(math.log((high - low) / 2, base))
    every = math.ceil((high - low) / step / most)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)][::every]


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
    apart = plot.mark is not None and min(low, default=0.0) > 0 and max(high) > FAR_APART * min(low)
    return plot.mark if apart and plot.mark is not None else 0.0
