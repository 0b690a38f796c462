"""The image demo's pictures: the reconstruction, the losses, and what one patch sees under each order."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, NullLocator
from torch import Tensor

from dilkit.tools.console.terminal import COLOURS
from dilkit.tools.demo.image.model import CURVES
from dilkit.tools.demo.image.sight import Sight
from dilkit.tools.demo.image.train import MASKS, Task, Twins
from dilkit.tools.demo.image.words import NAMES
from dilkit.tools.demo.text.plots import DENSE, DILATED, GREY, INK, finish

Data = dict[str, Any]

HUES = {"row-major": DENSE, "hilbert": DILATED}
_HIDDEN = 0.82
"""The grey of a hidden patch."""
_TICKS = [factor * 10.0**power for power in range(-5, 3) for factor in (1, 1.5, 2, 3, 5, 7)]
_NARROWEST = 1.4
"""Inches that the title of a strip takes."""
_ROOM = 1.32
"""The width of the loss picture with the labels, in widths without."""
_GUESS_NAMES = {"mean": "mean visible patch", "nearest": "nearest visible patch", "weighted": "weighted by distance"}


def draw_loss(results: Data, path: Path) -> None:
    """Held-out loss against steps, a thin line a seed and a thick one for their median; what guesses lose as dashed lines."""
    figure = Figure(figsize=(9, 4.8), layout="constrained", dpi=150)
    axis = figure.subplots()
    axis.set_yscale("log")
    steps, labels = results["training"]["steps"], []
    axis.set_xlim(0, steps * _ROOM)
    for curve in CURVES:
        loss = _draw_courses(axis, results["training"]["twins"], curve)
        labels.append((f"{NAMES[curve]} {loss:.3f}", loss, HUES[curve], "bold"))
    for name, guess in results["baselines"].items():
        axis.axhline(guess["loss"], xmax=1 / _ROOM, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
        labels.append((f"{_GUESS_NAMES[name]} {guess['loss']:.3f}", guess["loss"], GREY, "normal"))
    _draw_labels(axis, labels, steps * 1.015)
    axis.set_xticks([tick for tick in axis.get_xticks() if 0 <= tick <= steps])
    bottom, top = axis.get_ylim()
    axis.set_yticks([tick for tick in _TICKS if bottom <= tick <= top])
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axis.yaxis.set_minor_locator(NullLocator())
    finish(axis, "Held-out loss: thin lines are seeds, thick ones their median", "steps of training")
    figure.savefig(path)


def _draw_courses(axis: Axes, trainings: list[Data], curve: str) -> float:
    """A thin line for each seed, a thick one for the median of the finished ones (or the first); the end of the latter."""
    judged = [training for training in trainings if training["points"]]
    courses = [[(point["step"], point["held_out"][curve]) for point in training["points"]] for training in judged]
    for course in courses:
        axis.plot(*zip(*course, strict=True), color=HUES[curve], linewidth=0.9, alpha=0.45)
    whole = [course for course, training in zip(courses, judged, strict=True) if training["finished"]] or courses[:1]
    middle = [(points[0][0], median(loss for _, loss in points)) for points in zip(*whole, strict=True)]
    axis.plot(*zip(*middle, strict=True), "o-", color=HUES[curve], linewidth=2.2, markersize=6, markeredgecolor="white")
    return middle[-1][1]


def _draw_labels(axis: Axes, labels: list[tuple[str, float, str, str]], x: float) -> None:
    """Text at the heights of the values, moved apart where it would overlap."""
    bottom, top = map(math.log, axis.get_ylim())
    gap, height = 0.062 * (top - bottom), -math.inf
    for text, value, color, weight in sorted(labels, key=lambda label: label[1]):
        height = max(height + gap, math.log(value))
        axis.text(x, math.exp(height), text, color=color, weight=weight, va="center", fontsize=9)


def draw_reconstruction(task: Task, twins: Twins, path: Path) -> None:
    """The photograph with its held-out strip, and the strip: with hidden patches, filled in under each order, as it is."""
    strips = _strips(task, twins)
    rows, columns = task.photo.pixels.shape[:2]
    (top, bottom), (start, stop) = task.photo.held_out_rows, task.photo.strip
    widths = [columns / rows, *[(stop - start) / (bottom - top)] * len(strips)]
    height = min(max(5.6, _NARROWEST / min(widths)), 13 / sum(widths))
    figure = Figure(figsize=(height * sum(widths) + 0.8, height + 0.5), layout="constrained", dpi=150)
    axes = figure.subplots(1, len(widths), width_ratios=widths)
    _picture(axes[0], task.photo.pixels, "the photograph; the strip is held out")
    for color, width in (("white", 2.4), (INK, 0.9)):
        frame: Data = dict(fill=False, edgecolor=color, linewidth=width)
        axes[0].add_patch(Rectangle((start - 0.5, top - 0.5), stop - start, bottom - top, **frame))
    for axis, (title, pixels) in zip(axes[1:], strips.items(), strict=True):
        _picture(axis, pixels, title)
    figure.savefig(path)


def _strips(task: Task, twins: Twins) -> dict[str, Tensor]:
    """The held-out crops one below the other, `(rows, columns, 3)`, by title."""
    crops = len(task.held_out) // MASKS
    patches, hidden = task.held_out[:crops], task.hidden[:crops]
    known = torch.where(hidden[..., None], torch.nan, patches)
    strips = {"what the models see": torch.nan_to_num(task.pixels(known), nan=_HIDDEN)}
    for curve in CURVES:
        filled = torch.where(hidden[..., None], twins.predict(curve, patches, hidden), patches)
        loss = (filled - patches)[hidden].square().mean().item()
        strips[f"{NAMES[curve]}: {task.decibels(loss):.1f} dB"] = task.pixels(filled)
    strips["as it is"] = task.pixels(patches)
    return {title: pixels.flatten(0, 1) for title, pixels in strips.items()}


def draw_sight(task: Task, sight: Sight, path: Path) -> None:
    """The patches that a query sees in one head, coloured by in how many branches; a row a query, a column an order."""
    figure = Figure(figsize=(8.6, 9.2), layout="constrained", dpi=150)
    axes = figure.subplots(len(sight.queries), len(CURVES))
    crops, side, most = task.photo.held_out_crops(), task.config.patch, 1
    faded = 0.55 + 0.45 * crops[len(crops) // 2].mean(-1, keepdim=True).expand(-1, -1, 3)
    for row, (where, query) in zip(axes, sight.queries.items(), strict=True):
        for axis, curve in zip(row, CURVES, strict=True):
            seen = sight.of(query, curve)
            most = max(most, int(seen.max()))
            _picture(axis, _tinted(faded, seen, side), f"{NAMES[curve]}: a patch {where} sees {int((seen > 0).sum())}")
            y, x = (side * place - 0.5 for place in divmod(query, task.config.grid))
            axis.add_patch(Rectangle((x, y), side, side, facecolor=COLOURS[-1], edgecolor=INK, linewidth=1.6))
    kinds = [Patch(facecolor=COLOURS[-1], edgecolor=INK, linewidth=1.6, label="the patch that looks")]
    kinds += [Patch(color=_hue(n), label=f"{n} branch{'es' * (n > 1)}") for n in range(1, most + 1)]
    figure.legend(handles=kinds, loc="outside lower center", ncols=len(kinds), frameon=False, labelcolor=INK)
    figure.suptitle("What one patch sees in one head, by the number of branches", color=INK, fontsize=12, weight="bold")
    figure.savefig(path)


def _hue(count: int) -> str:
    return COLOURS[min(count + 1, len(COLOURS) - 1)]


def _tinted(pixels: Tensor, counts: Tensor, patch: int) -> Tensor:
    """`pixels` `(side, side, 3)`, each patch with a count above 0 in its colour."""
    tinted = pixels.clone()
    for count in range(1, int(counts.max()) + 1):
        chosen = (counts == count).repeat_interleave(patch, 0).repeat_interleave(patch, 1)
        tinted[chosen] = 0.12 * tinted[chosen] + 0.88 * torch.tensor(to_rgb(_hue(count)))
    return tinted


def _picture(axis: Axes, pixels: Tensor, title: str) -> None:
    axis.imshow(pixels.numpy(), interpolation="nearest")
    axis.set_title(title, color=INK, fontsize=9.5)
    axis.set_axis_off()
