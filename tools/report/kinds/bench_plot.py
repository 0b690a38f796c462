"""The picture of a bench result: time and memory over length, both log-log, every line labelled where it ends."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilkit.tools.console.text import in_bytes
from dilkit.tools.report.kinds.bench_report import contestants, headline, scaling, seconds

COLORS = ("#0b6e99", "#d1495b", "#e08e0b", "#3a7d44", "#6a4c93", "#5c5c5c")
INK, PALE, FAINT = "#222222", "#777777", "#dddddd"
_MOST_TICKS = 8

Result = dict[str, Any]


@dataclass(frozen=True)
class Quantity:
    """What a panel shows: how it is read out of an entry, written on the axis, and counted (decimal or binary steps)."""

    title: str
    read: Callable[[dict[str, Any]], float | None]
    show: Callable[[Any], str]
    steps: tuple[tuple[float, ...], ...]


_DECIMAL = tuple(tuple(m * 10.0**e for e in range(-8, 6) for m in factors) for factors in ((1, 2, 5), (1,)))
_BINARY = tuple(tuple(2.0**e for e in range(10, 50, every)) for every in (1, 2, 4))
TIME = Quantity("time of a call", lambda entry: entry["time"]["median_s"], seconds, _DECIMAL)
MEMORY = Quantity("peak extra memory of a call", lambda entry: entry.get("peak_bytes"), in_bytes, _BINARY)


def draw(result: Result, path: Path) -> None:
    """Write the picture of `result` to `path`. Raises ImportError where matplotlib is missing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.4), dpi=150, facecolor="white")
    time_axes, memory_axes = figure.subplots(1, 2)
    powers = {name: f"  ~ n$^{{{fit['exponent']:.2f}}}$" for name, fit in scaling(result["lengths"]).items()}
    _panel(time_axes, result, TIME, powers)
    _panel(memory_axes, result, MEMORY, {})
    for name, color in _colors(result).items():
        spread = [(n, e["time"]["q1_s"], e["time"]["q3_s"]) for n, e in _entries(result, name)]
        if spread:
            time_axes.fill_between(*zip(*spread, strict=True), color=color, alpha=0.18, linewidth=0)
    title, pattern, where = headline(result)
    figure.text(0.035, 0.955, title, fontsize=14, fontweight="bold", color=INK, va="top")
    figure.text(0.035, 0.895, textwrap.shorten(pattern, 150, placeholder=" ..."), fontsize=10, color=INK, va="top")
    figure.text(0.035, 0.02, where, fontsize=7.5, color=PALE)
    figure.subplots_adjust(left=0.075, right=0.915, top=0.77, bottom=0.15, wspace=0.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _panel(axes: Any, result: Result, quantity: Quantity, suffixes: dict[str, str]) -> None:
    ends = []
    for name, color in _colors(result).items():
        points = [(n, value) for n, entry in _entries(result, name) if (value := quantity.read(entry))]
        if points:
            axes.plot(*zip(*points, strict=True), color=color, linewidth=2.2, marker="o", markersize=5, clip_on=False)
            ends.append((*points[-1], f"{name}{suffixes.get(name, '')}", color))
    if not ends:
        axes.text(0.5, 0.5, "nothing measured", transform=axes.transAxes, ha="center", color=PALE)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.margins(y=0.08)
    _dress(axes, [length["seq"] for length in result["lengths"]], quantity)
    _label_ends(axes, ends)


def _dress(axes: Any, seqs: list[int], quantity: Quantity) -> None:
    axes.set_title(quantity.title, loc="left", fontsize=11, color=INK, pad=10)
    axes.set_xlabel("tokens", fontsize=9.5, color=INK)
    axes.set_xticks(seqs, labels=[f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}" for n in seqs])
    shown = ticks(quantity.steps, *axes.get_ylim())
    axes.set_yticks(shown, labels=[quantity.show(tick) for tick in shown])
    axes.minorticks_off()
    axes.tick_params(length=0, labelsize=9, colors=INK)
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def ticks(steps: Iterable[Iterable[float]], low: float, high: float) -> list[float]:
    """The finest of `steps` that has no more than eight ticks from `low` to `high`, else the coarsest."""
    inside: list[float] = []
    for values in steps:
        inside = [value for value in values if low <= value <= high]
        if len(inside) <= _MOST_TICKS:
            break
    return inside


def _label_ends(axes: Any, ends: list[tuple[float, float, str, str]]) -> None:
    """A label to the right of each line's last point; those of the longest length are moved up where they would overlap."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    gap, lowest = 0.065 * (high - low), -math.inf
    longest = max((end[0] for end in ends), default=0)
    for seq, value, label, color in sorted(ends, key=lambda end: end[1]):
        height = math.log(value)
        if seq == longest:
            lowest = height = max(height, lowest + gap)
        style = dict(fontsize=10.5, fontweight="bold", color=color, va="center", annotation_clip=False)
        axes.annotate(label, (seq, math.exp(height)), xytext=(10, 0), textcoords="offset points", **style)


def _colors(result: Result) -> dict[str, str]:
    return {name: COLORS[i % len(COLORS)] for i, name in enumerate(contestants(result["lengths"]))}


def _entries(result: Result, name: str) -> list[tuple[int, dict[str, Any]]]:
    pairs = ((length["seq"], length["entries"].get(name, {})) for length in result["lengths"])
    return [(n, entry) for n, entry in pairs if entry.get("verdict") == "measured"]
