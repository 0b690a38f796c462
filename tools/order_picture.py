"""A curve through a grid as a picture: its segments, and the keys that a rate keeps. matplotlib is imported when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dilkit.tools.order_report import label
from dilkit.tools.terminal import COLOURS

if TYPE_CHECKING:
    from dilkit.orders import TokenOrder

SUFFIXES = (".png", ".svg", ".pdf")
MAX_SIDE, MAX_CELLS_3D = 1024, 2**15
"""Beyond these a cell is less than can be seen."""
_LINE_CELLS = 128
"""Up to so many cells along a side the curve itself is drawn."""
_FLATTEST = 0.1
"""A grid that is flatter than this is drawn with cells that are higher than wide."""
_INK, _GREY = "#33333b", "#6b6b76"


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

    deep = len(pictured[0][0].shape) == 3
    rows, columns = _plane(pictured[0][0].shape)
    panel = 4.6 if deep else 5.0 * min(1.6, max(_FLATTEST, rows / columns))
    figure = Figure(figsize=(10.4, len(pictured) * (panel + 0.75)), dpi=160)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.14)
    axes = figure.subplots(len(pictured), 2, squeeze=False, subplot_kw={"projection": "3d"} if deep else {})
    for (order, found), (left, right) in zip(pictured, axes, strict=True):
        view = _View(order, length, rate)
        draw = (_solid_segments, _solid_kept) if deep else (_flat_segments, _flat_kept)
        for ax, paint in zip((left, right), draw, strict=True):
            paint(ax, view)
        name, part = label(found), found["aligned"]
        _title(
            left,
            f"{name}: segments of {length:,} tokens",
            f"{part['diameter']:.1f} cells across, {part['near_48']:.0%} of the 48 nearest neighbours inside",
        )
        kept = next(kept for kept in found["kept"] if kept["rate"] == rate)
        _title(right, f"{name}: keys kept at rate {rate}", f"nearest key {_far(kept)}; in full: one token's segment")
    figure.savefig(path, facecolor="white")


def _far(kept: dict[str, Any]) -> str:
    return "none" if kept["mean"] is None else f"{kept['mean']:.2f} cells away, at most {kept['max']:.1f}"


class _View:
    """The cells of an order along the curve, the segment of each, its colour, and which are kept."""

    def __init__(self, order: TokenOrder, length: int, rate: int) -> None:
        self.shape = order.shape
        places = np.arange(order.extra_tokens, len(order))
        self.cells = order.coordinates()
        self.segment = places // length
        self.kept = places % length % rate == 0
        self.token = tuple(3 * side // 8 for side in order.shape)
        self.inside = self.segment == self.segment[(self.cells == self.token).all(1)]
        """The cells in the segment of this one cell, neither at the edge nor where halves meet."""
        self.colours = _palette(int(self.segment[-1]) + 1)


def _palette(count: int) -> np.ndarray:
    """`(count, 3)`: a colour for each segment; neighbours along the curve are alike but can be told apart."""
    from matplotlib.colors import LinearSegmentedColormap

    chosen = LinearSegmentedColormap.from_list("segments", COLOURS[1:])
    return np.asarray(chosen(np.linspace(0, 1, max(count, 2))))[:count, :3]


def _plane(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = (1, 1, *shape)[-2:]
    return rows, columns


def _paled(colours: np.ndarray, strength: Any) -> np.ndarray:
    """Colours mixed with white."""
    paled: np.ndarray = 1 - strength * (1 - colours)
    return paled


def _image(view: _View, strength: Any) -> np.ndarray:
    """`(rows, columns, 3)`: the segments' colours, mixed with white."""
    image = np.ones((*_plane(view.shape), 3))
    rows, columns = _at(view)
    image[rows, columns] = _paled(view.colours[view.segment], strength)
    return image


def _at(view: _View) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of the cells along the curve."""
    return (np.zeros(len(view.cells), int), view.cells[:, 0]) if len(view.shape) == 1 else (view.cells[:, 0], view.cells[:, 1])


def _flat_segments(ax: Any, view: _View) -> None:
    from matplotlib.collections import LineCollection

    rows, columns = _at(view)
    fine = max(view.shape) <= _LINE_CELLS
    ax.imshow(_image(view, 0.30 if fine else 0.85), interpolation="nearest")
    if fine:
        steps, widths = _steps(np.stack([columns, rows], 1), min(2.6, 130 / max(view.shape)))
        ax.add_collection(
            LineCollection(list(steps), colors=view.colours[view.segment[:-1]], linewidths=widths, capstyle="round")
        )
    _borders(ax, view, view.segment, "white", 1.2)
    _frame(ax, view)


def _steps(points: np.ndarray, width: float) -> tuple[np.ndarray, np.ndarray]:
    """The curve's steps as lines, and their widths: jumps are thin, or they would hide the rest."""
    steps = np.stack([points[:-1], points[1:]], 1)
    return steps, np.where(np.abs(points[1:] - points[:-1]).sum(1) > 1, 0.25, 1.0) * width


def _flat_kept(ax: Any, view: _View) -> None:
    strength = np.where(view.kept, np.where(view.inside, 1.0, 0.42), np.where(view.inside, 0.22, 0.07))
    ax.imshow(_image(view, strength[:, None]), interpolation="nearest")
    _borders(ax, view, view.inside, _INK, 1.2)
    row, column = (0, *view.token)[-2:]
    ax.plot(column, row, "o", markersize=7, markerfacecolor="white", markeredgecolor=_INK, markeredgewidth=1.4, zorder=4)
    _frame(ax, view)


def _borders(ax: Any, view: _View, of: np.ndarray, colour: str, width: float) -> None:
    """Lines, beneath the curve, between cells whose values in `of` differ, and around what is not 0 at the grid's edge."""
    from matplotlib.collections import LineCollection

    rows, columns = _at(view)
    grid = np.zeros([side + 2 for side in _plane(view.shape)], int)
    grid[rows + 1, columns + 1] = of
    lines = []
    for down, right in ((1, 0), (0, 1)):
        r, c = np.nonzero(grid[down:, right:] != grid[: grid.shape[0] - down, : grid.shape[1] - right])
        begin = np.stack([c - 1.5 + right, r - 1.5 + down], 1)
        lines.append(np.stack([begin, begin + np.array([down, right])], 1))
    ax.add_collection(LineCollection([*lines[0], *lines[1]], colors=colour, linewidths=width, capstyle="projecting", zorder=1.5))


def _frame(ax: Any, view: _View) -> None:
    rows, columns = _plane(view.shape)
    ax.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), xticks=[], yticks=[])
    ax.set_aspect("equal" if rows >= _FLATTEST * columns else "auto")
    for spine in ax.spines.values():
        spine.set(color=_GREY, linewidth=0.6)


def _solid_segments(ax: Any, view: _View) -> None:
    from mpl_toolkits.mplot3d.art3d import Line3DCollection

    steps, widths = _steps(view.cells[:, ::-1].astype(float), max(1.0, min(3.5, 60 / max(view.shape))))
    ax.add_collection3d(Line3DCollection(steps, colors=view.colours[view.segment[:-1]], linewidths=widths, capstyle="round"))
    _space(ax, view)


def _solid_kept(ax: Any, view: _View) -> None:
    size = (120 / max(view.shape)) ** 2
    for chosen, part, alpha, edge in ((view.inside & ~view.kept, 0.1, 0.5, 0.0), (view.inside & view.kept, 1.0, 1.0, 0.7)):
        columns, rows, depth = view.cells[chosen, 2], view.cells[chosen, 1], view.cells[chosen, 0]
        colours = view.colours[view.segment[chosen]]
        ax.scatter(
            columns, rows, depth, s=size * part, c=colours, alpha=alpha, linewidths=edge, edgecolors=_INK, depthshade=False
        )
    _space(ax, view)


def _space(ax: Any, view: _View) -> None:
    depth, rows, columns = view.shape
    ax.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), zlim=(-0.5, depth - 0.5), xticks=[], yticks=[], zticks=[])
    ax.set_box_aspect((columns, rows, depth), zoom=1.15)
    ax.view_init(22, -58)
    for axis in (ax.xaxis, ax.yaxis, ax.zaxis):
        axis.set_pane_color("#f6f6f4")
        axis.line.set_color(_GREY)


def _title(ax: Any, title: str, figures: str) -> None:
    ax.set_title(title, loc="left", fontsize=11, weight="bold", color=_INK, pad=20)
    ax.annotate(figures, (0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points", fontsize=9, color=_GREY)
