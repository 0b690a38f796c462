"""The demo's pictures: the loss curve, and time and memory against length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

Data = dict[str, Any]

INK, GREY, PALE = "#1f2933", "#616e7c", "#e4e7eb"
DILATED, DENSE = "#0b6e99", "#c8553d"
_DOT: Data = dict(markersize=6, markeredgecolor="white", markeredgewidth=0.8, zorder=3)


def draw_loss(results: Data, path: Path) -> None:
    """Bits per byte against seconds of training: every step, their running mean, and the held-out evaluations."""
    figure = Figure(figsize=(8, 4.6), layout="constrained", dpi=150)
    axis = figure.subplots()
    curve, points = results["training"]["train_curve"], results["training"]["points"]
    seconds, losses = [x for x, _, _ in curve], [bits for *_, bits in curve]
    axis.plot(seconds, losses, ".", color=DILATED, alpha=0.2, markersize=4, markeredgewidth=0)
    axis.plot(seconds, running_mean(losses, max(len(losses) // 50, 1)), color=DILATED, linewidth=1.8, label="training text")
    axis.plot([p["seconds"] for p in points], [p["held_out"] for p in points], "o", color=DENSE, label="held-out text", **_DOT)
    for point in (points[:1] + points[-1:])[: len(points)]:
        _label(axis, f"{point['held_out']:.2f}", (point["seconds"], point["held_out"]), DENSE, (8, 8))
    axis.set_ylim(0, 9)
    axis.legend(frameon=False, loc="lower left", labelcolor=INK)
    finish(axis, "Bits per byte in the course of training", "seconds of training")
    figure.savefig(path)


def draw_scaling(results: Data, path: Path) -> None:
    """Time and peak memory of one forward and backward against length, both logarithmic, dilated and dense."""
    rows = results["scaling"]["rows"]
    figure = Figure(figsize=(10, 4.6), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2)
    for axis, title, field, factor, unit in (
        (left, "Time of forward and backward", "seconds", 1e3, "ms"),
        (right, "Peak extra memory", "peak_bytes", 1 / 2**20, "MiB"),
    ):
        lines = {kind: _points(rows, kind, field, factor) for kind in ("dilated", "dense")}
        _log_axes(axis, [row["tokens"] for row in rows])
        upper = max(lines, key=lambda kind: lines[kind][-1][1] if lines[kind] else 0.0)
        for kind, color in (("dilated", DILATED), ("dense", DENSE)):
            if lines[kind]:
                axis.plot(*zip(*lines[kind], strict=True), "o-", color=color, linewidth=1.8, **_DOT)
                tokens, value = lines[kind][-1]
                text = f"{kind}\n{_number(value)} {unit}" + ("" if tokens == rows[-1]["tokens"] else "\n(longer: left out)")
                _label(axis, text, (tokens, value), color, (10, 14 if kind == upper else -14))
        axis.set_ylim(top=axis.get_ylim()[1] * 1.6)
        finish(axis, f"{title}, {unit}", "tokens")
    figure.savefig(path)


def _points(rows: list[Data], kind: str, field: str, factor: float) -> list[tuple[int, float]]:
    measured = [(row["tokens"], row[kind][field]) for row in rows if row[kind] is not None]
    return [(tokens, factor * value) for tokens, value in measured if value is not None]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _label(axis: Axes, text: str, where: tuple[float, float], color: str, shift: tuple[float, float]) -> None:
    style: Data = dict(textcoords="offset points", va="center", color=color, weight="bold", annotation_clip=False)
    axis.annotate(text, where, shift, **style)


def _log_axes(axis: Axes, tokens: list[int]) -> None:
    """Both axes logarithmic, with room on the right for the labels."""
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_locator(FixedLocator(tokens))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:g}K" if n >= 1024 else f"{n:g}"))
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _number(y)))
    if tokens:
        axis.set_xlim(tokens[0] / 1.2, tokens[-1] * 2.6)


def finish(axis: Axes, title: str, x_label: str) -> None:
    """The look that both pictures share."""
    axis.set_title(title, loc="left", color=INK, fontsize=12, weight="bold", pad=12)
    axis.set_xlabel(x_label, color=GREY)
    axis.tick_params(colors=GREY, length=0)
    axis.grid(color=PALE, linewidth=0.8)
    axis.set_axisbelow(True)
    for spine in axis.spines.values():
        spine.set_visible(False)


def running_mean(values: list[float], width: int) -> list[float]:
    """The mean of each value and up to `width - 1` before it."""
    parts = [values[max(i - width + 1, 0) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]
