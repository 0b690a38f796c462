"""Curves through a grid, drawn: their segments, and the keys that a rate keeps. matplotlib is imported only when one is drawn.

Cells are squares in the colours of their segments; a grid in space is drawn layer by layer, side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt
from typing import Any

import numpy as np

from dilkit.orders.locality import LocalityReport
from dilkit.orders.token_order import TokenOrder
from dilkit.viz.counts import GREY, INK, SCALE

LINE_CELLS = 128
"""Up to so many cells along a side the curve itself is drawn."""
FLATTEST, TALLEST = 0.1, 1.6
"""Height over width of a panel: cells of a grid beyond are drawn higher than wide, or the panel is left wide."""


class OrderView:
    """The cells of an order along the curve: the place of each in the picture, its segment and colour, and if it is kept."""

    def __init__(self, order: TokenOrder, length: int, rate: int) -> None:
        from matplotlib.colors import LinearSegmentedColormap

        places, cells = np.arange(order.extra_tokens, len(order)), order.coordinates()
        depth, rows, columns = (1, 1, *order.shape)[-3:]
        across = ceil(sqrt(depth))
        self.layer, row, column = np.unravel_index(order.perm[order.extra_tokens :] - order.extra_tokens, (depth, rows, columns))
        self.shape = ceil(depth / across) * (rows + 1) - 1, across * (columns + 1) - 1
        self.place = self.layer // across * (rows + 1) + row, self.layer % across * (columns + 1) + column
        self.segment = places // length
        self.is_key = places % length % rate == 0
        scale = LinearSegmentedColormap.from_list("segments", SCALE[1:])
        self.colours = np.asarray(scale(np.linspace(0, 1, max(int(self.segment[-1]) + 1, 2))))[self.segment, :3]
        token = (cells == [min(3 * side // 8 + 1, side - 1) for side in order.shape]).all(1)
        self.token = self.place[1][token], self.place[0][token]
        self.inside = self.segment == self.segment[token]
        """The cells in the segment of this one token, which is neither at the edge nor on the border of two halves."""

    def image(self, strength: Any) -> np.ndarray:
        """Return the segments' colours, mixed with white: `(rows, columns, 3)`."""
        image = np.ones((*self.shape, 3))
        image[self.place] = 1 - strength * (1 - self.colours)
        return image


def draw_orders(figure: Any, orders: Sequence[tuple[TokenOrder, LocalityReport]]) -> None:
    """Draw orders of one grid into a matplotlib figure, which gets the size that it needs.

    One a row, each with its figures: on the left the segments of its report, on the right the keys that the last rate keeps.
    Raises ValueError for no orders, for orders of several grids, and for a report of another order.

    Example:

        >>> from matplotlib.figure import Figure
        >>> from dilkit import locality_report, order
        >>> from dilkit.viz import draw_orders
        >>> figure = Figure()
        >>> curves = [order((32, 32), curve) for curve in ("hilbert", "row-major")]
        >>> draw_orders(figure, [(curve, locality_report(curve, 256, [8])) for curve in curves])
        >>> figure.savefig("orders.png")  # doctest: +SKIP
    """
    _check_orders(orders)
    views = [OrderView(order, report.segment_length, report.kept[-1].rate) for order, report in orders]
    rows, columns = views[0].shape
    flatness = min(TALLEST, max(FLATTEST, rows / columns))
    height = len(orders) * (5.0 * flatness + 0.75)
    figure.set_size_inches(10.4, height)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.14, rect=(0, 0, 1, 1 - 0.08 / height))
    axes = figure.subplots(len(orders), 2, squeeze=False)
    for view, (_, report), (left, right) in zip(views, orders, axes, strict=True):
        _draw_segments(left, view, report)
        _draw_keys(right, view, report)


def _check_orders(orders: Sequence[tuple[TokenOrder, LocalityReport]]) -> None:
    if len(shapes := sorted({order.shape for order, _ in orders})) != 1:
        raise ValueError(f"orders are of {len(shapes)} grids {shapes}; one figure shows orders of one grid, at least one")
    for order, report in orders:
        drawn, reported = (
            {name: getattr(one, name) for name in ("shape", "curve", "tile", "extra_tokens")} for one in (order, report)
        )
        if drawn != reported:
            raise ValueError(f"the report with {order!r} is of another order: {reported}; pass locality_report of it")


def _draw_segments(ax: Any, view: OrderView, report: LocalityReport) -> None:
    from matplotlib.collections import LineCollection

    fine = max(view.shape) <= LINE_CELLS
    ax.imshow(view.image(0.30 if fine else 0.85), interpolation="nearest")
    if fine:
        points = np.stack(view.place[::-1], 1)
        jumps = np.abs(np.diff(points, axis=0)).sum(1) > 1
        widths = np.where(jumps, 0.25, 1.0) * (np.diff(view.layer) == 0) * min(2.6, 130 / max(view.shape))
        lines = list(np.stack([points[:-1], points[1:]], 1))
        ax.add_collection(LineCollection(lines, colors=view.colours[:-1], linewidths=widths, capstyle="round"))
    _draw_borders(ax, view, view.segment, "white")
    compact = report.aligned
    across = f"{compact.diameter:.1f} cells across, {compact.near_48:.0%} of the 48 nearest neighbours inside"
    _dress(ax, view, f"{report.name}: segments of {report.segment_length:,} tokens", across)


def _draw_keys(ax: Any, view: OrderView, report: LocalityReport) -> None:
    strength = np.where(view.is_key, np.where(view.inside, 1.0, 0.42), np.where(view.inside, 0.22, 0.07))
    ax.imshow(view.image(strength[:, None]), interpolation="nearest")
    _draw_borders(ax, view, view.inside, INK)
    ax.plot(*view.token, "o", markersize=7, markerfacecolor="white", markeredgecolor=INK, markeredgewidth=1.4, zorder=4)
    nearest = report.kept[-1]
    far = "none" if nearest.mean is None else f"{nearest.mean:.2f} cells away, at most {nearest.max:.1f}"
    _dress(ax, view, f"{report.name}: keys kept at rate {nearest.rate}", f"nearest key {far}; in full: one token's segment")


def _draw_borders(ax: Any, view: OrderView, values: np.ndarray, colour: str) -> None:
    from matplotlib.collections import LineCollection

    grid = np.zeros([side + 2 for side in view.shape], int)
    grid[view.place[0] + 1, view.place[1] + 1] = values
    lines: list[Any] = []
    for down, right in ((1, 0), (0, 1)):
        r, c = np.nonzero(grid[down:, right:] != grid[: grid.shape[0] - down, : grid.shape[1] - right])
        begin = np.stack([c - 1.5 + right, r - 1.5 + down], 1)
        lines += list(np.stack([begin, begin + np.array([down, right])], 1))
    ax.add_collection(LineCollection(lines, colors=colour, linewidths=1.2, capstyle="projecting", zorder=1.5))


def _dress(ax: Any, view: OrderView, title: str, figures: str) -> None:
    rows, columns = view.shape
    ax.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), xticks=[], yticks=[])
    ax.set_aspect("equal" if rows >= FLATTEST * columns else "auto")
    for spine in ax.spines.values():
        spine.set(color=GREY, linewidth=0.6)
    ax.set_title(title, loc="left", x=0.0, fontsize=11, weight="bold", color=INK, pad=20)
    ax.annotate(figures, (0.0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points", fontsize=9, color=GREY)
