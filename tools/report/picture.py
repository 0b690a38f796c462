"""Pictures of plots by matplotlib, without which everything here raises ImportError."""

import io
import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dilkit import files
from dilkit.tools.console.text import UNITS
from dilkit.tools.report.document import Axis, Plot, Point

COLORS = (
    *("#0b6e99", "#d1495b", "#c77700", "#3a7d44", "#6a4c93", "#5c5c5c"),
    *("#12a193", "#d66fb3", "#92901f", "#8b5a3c", "#6aa3e0", "#b0a7b9"),
)
INK, PALE, FAINT, BACK = "#222222", "#6f6f6f", "#dddddd", "#fefefe"
MARKERS = "osD^v"
DASHES = ((5, 2), (1, 1.5), (6, 2, 1, 2))
"""Dashes of series that are no measurements, in turns: on and off, in widths of the line."""
WIDTH = 4.4
"""Inches. A phone shows that at its natural size, so that texts can be read."""
LETTERS = 62
"""Letters of a headline in the width of a picture."""
TITLE_LETTERS, LABEL_LETTERS = 48, 32
"""Letters in a line of a plot's title, and of a bar's label."""
MOST_TICKS, MOST_MARKERS = 7, 60
FAR_APART = 60
"""The largest over the least ratio of bars that are drawn on a linear axis."""
_DECADE = ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))
_OCTAVE = ((1, 1.25, 1.5, 1.75), (1,))
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dilkit",
    "text.parse_math": False,
    "axes.unicode_minus": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    "font.size": 9.5,
}


def svg(plot: Plot) -> str:
    file, plot = io.StringIO(), _drawable(plot)
    with new_figure(WIDTH, _height(plot)) as figure:
        _draw(figure, plot)
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return file.getvalue()


def write_png(plots: Sequence[Plot], path: Path, headline: Sequence[str] = ()) -> None:
    """Draw all plots of a document as one picture, in two columns of equal length, below the lines of `headline`."""
    columns: list[list[tuple[Plot, float]]] = [[] for _ in plots[:2]]
    for plot in map(_drawable, plots):
        shortest = min(columns, key=lambda column: sum(high for _, high in column))
        shortest.append((plot, _height(plot) + 0.4 + 0.17 * _wrapped_title(plot).count("\n")))
    lines = [part for line in headline for part in textwrap.wrap(line, LETTERS * len(columns))]
    height = max(sum(high for _, high in column) for column in columns)
    with new_figure(WIDTH * len(columns), height + 0.19 * len(lines) + 0.1) as figure:
        if lines:
            figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=9, color=INK)
        for column, place in zip(columns, figure.subfigures(1, len(columns), squeeze=False)[0], strict=True):
            heights = [high for _, high in column]
            panels = place.subfigures(len(column) + 1, 1, squeeze=False, height_ratios=[*heights, height - sum(heights) + 0.01])
            for (plot, _), (panel,) in zip(column, panels, strict=False):
                _draw(panel, plot, _wrapped_title(plot))
        save(figure, path, dpi=150)


@contextmanager
def new_figure(width: float = 6.4, height: float = 4.8) -> Iterator[Any]:
    """Yield a figure of so many inches, in dilkit's style, to be drawn and saved within this context."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names in scripts that the font lacks, labels that leave little room: it is drawn
        yield Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save(figure: Any, file: Path, **options: Any) -> None:
    """Write a figure: the one place where files of pictures are written."""
    with files.replacing(file) as written:
        figure.savefig(written, format=file.suffix[1:] or "png", **options)


def _drawable(plot: Plot) -> Plot:
    x, y = (axis.log and plot.kind != "bars" for axis in plot.axes)
    able = [
        replace(one, points=tuple(p for p in one.points if not (x and float(p.x) <= 0) and not (y and p.low <= 0)))
        for one in plot.series
    ]
    return replace(plot, series=tuple(one for one in able if one.points))


def _wrapped_title(plot: Plot) -> str:
    return textwrap.fill(plot.title, TITLE_LETTERS)


def _labels(plot: Plot) -> list[str]:
    return list(dict.fromkeys(str(point.x) for series in plot.series for point in series.points))


def _height(plot: Plot) -> float:
    """Return inches: for as many bars as there are, and a line of legend for every series."""
    named = len(plot.series) if len(plot.series) > 1 else 0
    legend = 0.17 * -(-named // _legend_columns(plot))
    if plot.kind != "bars":
        return 2.7 + legend
    return 0.75 + legend + len(_labels(plot)) * (0.07 + 0.17 * len(plot.series))


def _legend_columns(plot: Plot) -> int:
    longest = max((len(series.name) for series in plot.series), default=0)
    return 4 if longest <= 9 else 2 if longest <= 28 else 1


def _draw(figure: Any, plot: Plot, title: str = "") -> None:
    axes = figure.subplots()
    axes.set_facecolor("none")
    (_bars if plot.kind == "bars" else _lines)(axes, plot)
    axes.spines[:].set_visible(False)
    axes.tick_params(which="both", length=0, colors=INK, labelsize=8.5)
    axes.grid(axis="x" if plot.kind == "bars" else "both", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    if len(plot.series) > 1:
        handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        ordered = [handles[str(i)] for i in range(len(plot.series))]
        style: dict[str, Any] = dict(frameon=False, fontsize=8.5, labelcolor=INK, handlelength=1.6, columnspacing=1.4)
        style |= dict(title=title, alignment="left", title_fontproperties=dict(size=10, weight="bold")) if title else {}
        names = [series.name for series in plot.series]
        figure.legend(ordered, names, loc="outside upper left", ncols=_legend_columns(plot), **style)
    elif title:
        figure.suptitle(title, x=0.02, ha="left", fontsize=10, fontweight="bold", color=INK)


def _lines(axes: Any, plot: Plot) -> None:
    places = sorted({float(point.x) for series in plot.series if not series.dashed for point in series.points})
    if len(places) > MOST_TICKS or plot.kind != "lines":
        places = []  # else the places of points are the ticks
    for i, series in enumerate(plot.series):
        x, y = ([getattr(p, name) for p in series.points] for name in ("x", "y"))
        if series.dashed:
            dashes = DASHES[sum(one.dashed for one in plot.series[:i]) % len(DASHES)]
            axes.plot(x, y, linestyle=(0, dashes), linewidth=1.3, color=PALE, label=str(i))
            continue
        marker = dict(marker=None if len(x) > MOST_MARKERS else MARKERS[i % len(MARKERS)], markersize=4.5 - 0.3 * i)
        width = max(1.4, 2.2 - 0.3 * i)  # lines that lie on each other all show
        line = dict(linestyle="none" if plot.kind == "points" else "-", linewidth=width, color=_color(plot, i))
        axes.errorbar(x, y, yerr=_reach(series.points), elinewidth=1, capsize=2, label=str(i), **marker, **line)
    for number, axis in enumerate(plot.axes):
        scale(axes, "xy"[number], axis, places if number == 0 else [])


def _color(plot: Plot, number: int) -> str:
    """Return the colour of a series: that of dilkit is the first in every picture."""
    names = [series.name for series in plot.series]
    ordered = sorted(range(len(names)), key=lambda i: names[i] != "dilkit")
    return COLORS[ordered.index(number) % len(COLORS)]


def _reach(points: Sequence[Point]) -> list[list[float]] | None:
    if all(p.low == p.high for p in points):
        return None
    return [[max(p.y - p.low, 0.0) for p in points], [max(p.high - p.y, 0.0) for p in points]]


def _bars(axes: Any, plot: Plot) -> None:
    labels, count = _labels(plot), len(plot.series)
    height, (foot, *ends) = 0.82 / count, bar_range(plot)
    for i, series in enumerate(plot.series):
        places = [labels.index(str(p.x)) + (i - (count - 1) / 2) * height for p in series.points]
        axes.barh(
            places, [p.y - foot for p in series.points], left=foot, height=height * 0.9, color=_color(plot, i),
            label=str(i), xerr=_reach(series.points), ecolor=INK, error_kw=dict(elinewidth=0.9, capsize=1.8),
        )  # fmt: skip
        behind = dict(facecolor=BACK, edgecolor="none", pad=0.6)  # no line goes through a bar's value
        for y, p in zip(places, series.points, strict=True):
            place = dict(xytext=(4, 0), textcoords="offset points", va="center", fontsize=8, color=INK, bbox=behind)
            axes.annotate(UNITS[plot.axes[1].unit](p.y), (max(p.high, p.y, foot), y), **place)
        for label in {*labels} - {str(p.x) for p in series.points}:
            y = labels.index(label) + (i - (count - 1) / 2) * height
            axes.annotate(
                "not measured", (foot, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8, color=PALE
            )
    axes.set_yticks(range(len(labels)), [textwrap.fill(label, LABEL_LETTERS) for label in labels])
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(*ends)
    scale(axes, "x", replace(plot.axes[1], log=foot > 0), [], most=4)
    if plot.mark is not None:
        axes.axvline(plot.mark, color=INK, linewidth=1)


def scale(axes: Any, name: str, axis: Axis, ticks: list[float], most: int = MOST_TICKS) -> None:
    """Dress the axis of this `name`, "x" or "y"; with these ticks, or at `most` so many round ones."""
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
        in_bytes = axis.unit == "bytes"
        one.set_major_locator(MultipleLocator(2.0 ** math.ceil(math.log2(high / 5))) if in_bytes else MaxNLocator(5))
    one.set_major_formatter(lambda value, _: UNITS[axis.unit](value))
    one.set_label_text(axis.title, color=PALE)


def log_ticks(low: float, high: float, binary: bool = False, most: int = MOST_TICKS) -> list[float]:
    """Return two to `most` round numbers from `low` to `high`: the wider the axis, the fewer in a decade or octave."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    base, factors = (2.0, _OCTAVE) if binary else (10.0, _DECADE)
    for locator in (*(LogLocator(base, few, numticks=most) for few in factors), MaxNLocator(most - 1)):
        ticks = [float(tick) for tick in locator.tick_values(low, high) if low <= tick <= high]
        if 2 <= len(ticks) <= most:
            break
    return ticks


def bar_range(plot: Plot) -> tuple[float, float, float]:
    """Return where bars begin, and the ends of their axis, with room for the values behind them.

    They begin at 0; for ratios that lie far apart, on a logarithmic axis, at the mark.
    """
    points = [point for series in plot.series for point in series.points]
    low, high = min(p.low for p in points), max(p.high for p in points)
    if plot.mark and low > 0 and high > FAR_APART * low:
        low, high = min(plot.mark, low), max(plot.mark, high)
        return plot.mark, low, high * (high / low) ** 0.25
    low, high = min(0.0, low), max(0.0, high)
    return 0.0, low, high + 0.2 * ((high - low) or 1.0)
