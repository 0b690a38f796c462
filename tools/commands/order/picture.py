"""A curve through a grid as a picture: its segments, and the keys that a rate keeps. matplotlib is imported when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dilkit.orders.locality import LocalityReport
from dilkit.orders.token_order import TokenOrder
from dilkit.tools.commands.order.report import label
from dilkit.tools.console.terminal import COLOURS

INK, GREY = "#33333b", "#6b6b76"


class View:
    """The cells of an order along the curve, the segment of each, its colour, and which are kept."""

    def __init__(self, order: TokenOrder, length: int, rate: int) -> None:
        places = np.arange(order.extra_tokens, len(order))
        self.shape = order.shape
        self.cells = order.coordinates()
        self.segment = places // length
        self.kept = places % length % rate == 0
        self.colours = _palette(int(self.segment[-1]) + 1)[self.segment]
        self.token = tuple(min(3 * side // 8 + 1, side - 1) for side in order.shape)
        self.inside = self.segment == self.segment[(self.cells == self.token).all(1)]
        """The cells in the segment of this one token, which is neither at the edge nor on the border of two halves."""


def save_picture(pictured: list[tuple[TokenOrder, LocalityReport]], length: int, rate: int, path: Path) -> None:
    """Draw orders, one a row, each with its figures: on the left its segments, on the right the keys kept."""
    from dilkit.tools.commands.order import flat, solid
    from dilkit.tools.report.picture import new_figure, save

    deep = len(pictured[0][0].shape) == 3
    drawing: Any = solid if deep else flat
    flatness = drawing.flatness(pictured[0][0].shape)
    begin = 0.5 - 0.5 / flatness if deep else 0.0  # axes in space are square, in the middle of their panel
    with new_figure(10.4, len(pictured) * (5.0 * flatness + 0.75)) as figure:
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.14, rect=(0, 0, 1, 1 - 0.08 / figure.get_figheight()))
        axes = figure.subplots(len(pictured), 2, squeeze=False, subplot_kw={"projection": "3d"} if deep else {})
        for (order, found), (left, right) in zip(pictured, axes, strict=True):
            view = View(order, length, rate)
            drawing.segments(left, view)
            drawing.kept(right, view)
            for ax, texts in ((left, _of_segments(found)), (right, _of_kept(found, rate))):
                _title(ax, begin, *texts)
        save(figure, path, dpi=160)


def steps(points: np.ndarray, width: float) -> tuple[np.ndarray, np.ndarray]:
    """The curve's steps as lines, and their widths: jumps are thin, or they would hide the rest."""
    jumps = np.abs(points[1:] - points[:-1]).sum(1) > 1
    return np.stack([points[:-1], points[1:]], 1), np.where(jumps, 0.25, 1.0) * width


def _palette(count: int) -> np.ndarray:
    """`(count, 3)`: a colour for each segment; neighbours along the curve are alike but can be distinguished."""
    from matplotlib.colors import LinearSegmentedColormap

    chosen = LinearSegmentedColormap.from_list("segments", COLOURS[1:])
    return np.asarray(chosen(np.linspace(0, 1, max(count, 2))))[:count, :3]


def _of_segments(found: LocalityReport) -> tuple[str, str]:
    compact = found.aligned
    across = f"{compact.diameter:.1f} cells across, {compact.near_48:.0%} of the 48 nearest neighbours inside"
    return f"{label(found)}: segments of {found.segment_length:,} tokens", across


def _of_kept(found: LocalityReport, rate: int) -> tuple[str, str]:
    kept = next(kept for kept in found.kept if kept.rate == rate)
    far = "none" if kept.mean is None else f"{kept.mean:.2f} cells away, at most {kept.max:.1f}"
    return f"{label(found)}: keys kept at rate {rate}", f"nearest key {far}; in full: one token's segment"


def _title(ax: Any, begin: float, title: str, figures: str) -> None:
    ax.set_title(title, loc="left", x=begin, fontsize=11, weight="bold", color=INK, pad=20)
    ax.annotate(figures, (begin, 1), (0, 6), xycoords="axes fraction", textcoords="offset points", fontsize=9, color=GREY)
