"""A curve through a grid as a picture: its segments, and the keys that a rate keeps. matplotlib is imported when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dilkit.tools.commands.order.report import label
from dilkit.tools.console.terminal import COLOURS

if TYPE_CHECKING:
    from dilkit.orders.token_order import TokenOrder

SUFFIXES = (".png", ".svg", ".pdf")
MAX_SIDE, MAX_CELLS_3D = 1024, 2**15
"""Beyond these a cell is less than can be seen."""
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
        """The cells in the segment of this one token, which is neither at the edge nor where halves meet."""


def check_picture(shape: tuple[int, ...], path: Path) -> None:
    """Raise ValueError naming --png or --shape where there can be no picture."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--png: {str(path)!r} must end in {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--png: the folder {str(path.parent)!r} does not exist; create it first")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--png: a picture needs matplotlib (pip install 'dilkit[plot]'): {error}") from None
    cells = int(np.prod(shape))
    if len(shape) < 3 and max(shape) > MAX_SIDE:
        raise ValueError(f"--shape: a side of {max(shape):,} is more than a picture can show; at most {MAX_SIDE:,}")
    if len(shape) == 3 and cells > MAX_CELLS_3D:
        raise ValueError(f"--shape: {cells:,} cells in space are more than a picture can show; at most {MAX_CELLS_3D:,}")


def save_picture(pictured: list[tuple[TokenOrder, dict[str, Any]]], length: int, rate: int, path: Path) -> None:
    """Draw orders, one a row, each with its report as plain data: on the left its segments, on the right the keys kept."""
    from matplotlib.figure import Figure

    from dilkit.tools.commands.order import flat as order_flat
    from dilkit.tools.commands.order import solid as order_solid

    shape = pictured[0][0].shape
    deep = len(shape) == 3
    draw: Any = order_solid if deep else order_flat
    flatness = draw.flatness(shape)
    figure = Figure(figsize=(10.4, len(pictured) * (5.0 * flatness + 0.75)), dpi=160)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.14, rect=(0, 0, 1, 1 - 0.08 / figure.get_figheight()))
    axes = figure.subplots(len(pictured), 2, squeeze=False, subplot_kw={"projection": "3d"} if deep else {})
    begin = 0.5 - 0.5 / flatness if deep else 0.0  # axes in space are square, in the middle of their panel
    for (order, found), (left, right) in zip(pictured, axes, strict=True):
        view = View(order, length, rate)
        draw.segments(left, view)
        draw.kept(right, view)
        for ax, texts in ((left, _of_segments(found)), (right, _of_kept(found, rate))):
            _title(ax, begin, *texts)
    figure.savefig(path, facecolor="white")


def steps(points: np.ndarray, width: float) -> tuple[np.ndarray, np.ndarray]:
    """The curve's steps as lines, and their widths: jumps are thin, or they would hide the rest."""
    jumps = np.abs(points[1:] - points[:-1]).sum(1) > 1
    return np.stack([points[:-1], points[1:]], 1), np.where(jumps, 0.25, 1.0) * width


def _palette(count: int) -> np.ndarray:
    """`(count, 3)`: a colour for each segment; neighbours along the curve are alike but can be told apart."""
    from matplotlib.colors import LinearSegmentedColormap

    chosen = LinearSegmentedColormap.from_list("segments", COLOURS[1:])
    return np.asarray(chosen(np.linspace(0, 1, max(count, 2))))[:count, :3]


def _of_segments(found: dict[str, Any]) -> tuple[str, str]:
    compact = found["aligned"]
    across = f"{compact['diameter']:.1f} cells across, {compact['near_48']:.0%} of the 48 nearest neighbours inside"
    return f"{label(found)}: segments of {found['segment_length']:,} tokens", across


def _of_kept(found: dict[str, Any], rate: int) -> tuple[str, str]:
    kept = next(kept for kept in found["kept"] if kept["rate"] == rate)
    far = "none" if kept["mean"] is None else f"{kept['mean']:.2f} cells away, at most {kept['max']:.1f}"
    return f"{label(found)}: keys kept at rate {rate}", f"nearest key {far}; in full: one token's segment"


def _title(ax: Any, begin: float, title: str, figures: str) -> None:
    ax.set_title(title, loc="left", x=begin, fontsize=11, weight="bold", color=INK, pad=20)
    ax.annotate(figures, (begin, 1), (0, 6), xycoords="axes fraction", textcoords="offset points", fontsize=9, color=GREY)
