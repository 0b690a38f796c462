"""The image demo's photographs: the strip as the models fill it in, and what one patch sees under each order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilkit.tools.demo.image.photo import Photograph
from dilkit.tools.demo.image.sight import PatternSight
from dilkit.tools.demo.image.task import MASKS, PairTask
from dilkit.tools.report.kinds.demo_image import NAMES
from dilkit.tools.report.picture import INK, new_figure, save
from dilkit.tools.results.kinds.demo_image import CURVES
from dilkit.viz.colours import SCALE

_HIDDEN = 0.82
"""The grey of a hidden patch."""
_NARROWEST = 1.4
"""Inches that the title of a strip takes."""


def draw_reconstruction(task: PairTask, path: Path) -> None:
    """The photograph with its held-out strip, and the strip: with hidden patches, filled in under each order, as it is."""
    strips, photo = _strips(task), task.crops.photo
    rows, columns = photo.pixels.shape[:2]
    (top, bottom), (start, stop) = photo.held_out_rows, photo.strip
    widths = [columns / rows, *[(stop - start) / (bottom - top)] * len(strips)]
    height = min(max(5.6, _NARROWEST / min(widths)), 13 / sum(widths))
    with new_figure(height * sum(widths) + 0.8, height + 0.5) as figure:
        axes = figure.subplots(1, len(widths), width_ratios=widths)
        _show(axes[0], photo.pixels, "the photograph; the strip is held out")
        for color, width in (("white", 2.4), (INK, 0.9)):
            _frame(axes[0], (start, top), (stop - start, bottom - top), edgecolor=color, linewidth=width, fill=False)
        for axis, (title, pixels) in zip(axes[1:], strips.items(), strict=True):
            _show(axis, pixels, title)
        save(figure, path, dpi=150)


def _strips(task: PairTask) -> dict[str, Tensor]:
    """The held-out crops one below the other, `(rows, columns, 3)`, by title."""
    crops, count = task.crops, len(task.crops.held_out) // MASKS
    patches, hidden = crops.held_out[:count], crops.hidden[:count]
    known = torch.where(hidden[..., None], torch.nan, patches)
    strips = {"what the models see": torch.nan_to_num(crops.pixels(known), nan=_HIDDEN)}
    for curve in CURVES:
        filled = torch.where(hidden[..., None], task.predict(curve, patches, hidden), patches)
        loss = (filled - patches)[hidden].square().mean().item()
        strips[f"{NAMES[curve]}: {crops.decibels(loss):.1f} dB"] = crops.pixels(filled)
    strips["as it is"] = crops.pixels(patches)
    return {title: pixels.flatten(0, 1) for title, pixels in strips.items()}


def draw_sight(photo: Photograph, sight: PatternSight, path: Path) -> None:
    """The patches that a query sees in one head, coloured by in how many branches; a row a query, a column an order."""
    held_out, side = photo.held_out_crops(), sight.config.patch
    faded = 0.55 + 0.45 * held_out[len(held_out) // 2].mean(-1, keepdim=True).expand(-1, -1, 3)
    with new_figure(8.6, 8.9) as figure:
        axes = figure.subplots(len(sight.queries), len(CURVES))
        for row, (where, query) in zip(axes, sight.queries.items(), strict=True):
            for axis, curve in zip(row, CURVES, strict=True):
                seen = sight.of(query, curve)
                _show(axis, _tinted(faded, seen, side), f"{NAMES[curve]}: a patch {where} sees {int((seen > 0).sum())}")
                down, across = (side * place for place in divmod(query, sight.config.grid))
                _frame(axis, (across, down), (side, side), facecolor=SCALE[-1], edgecolor=INK, linewidth=1.6)
        figure.suptitle("What one patch sees in one head: the darker, the more branches", color=INK, fontsize=12, weight="bold")
        save(figure, path, dpi=150)


def _tinted(pixels: Tensor, counts: Tensor, patch: int) -> Tensor:
    """`pixels` `(side, side, 3)`, each patch with a count above 0 in that count's colour."""
    from matplotlib.colors import to_rgb

    tinted = pixels.clone()
    for count in range(1, int(counts.max()) + 1):
        chosen = (counts == count).repeat_interleave(patch, 0).repeat_interleave(patch, 1)
        colour = SCALE[min(count + 1, len(SCALE) - 1)]
        tinted[chosen] = 0.12 * tinted[chosen] + 0.88 * torch.tensor(to_rgb(colour))
    return tinted


def _show(axis: Any, pixels: Tensor, title: str) -> None:
    axis.imshow(pixels.numpy(), interpolation="nearest")
    axis.set_title(title, color=INK, fontsize=9.5)
    axis.set_axis_off()


def _frame(axis: Any, corner: tuple[int, int], size: tuple[int, int], **style: Any) -> None:
    """A rectangle of pixels, from its left upper corner on."""
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((corner[0] - 0.5, corner[1] - 0.5), *size, **style))
