"""Orders of one and two dimensions, drawn: cells as squares in the colours of their segments."""

from __future__ import annotations

from typing import Any

import numpy as np

from dilkit.tools.commands.order.picture import GREY, INK, View, steps

_LINE_CELLS = 128
"""Up to so many cells along a side the curve itself is drawn."""
_FLATTEST, _TALLEST = 0.1, 1.6
"""Height over width of a panel: cells of a grid beyond are drawn higher than wide, or the panel is left wide."""


def flatness(shape: tuple[int, ...]) -> float:
    """The height of a panel over its width."""
    rows, columns = _plane(shape)
    return min(_TALLEST, max(_FLATTEST, rows / columns))


def segments(ax: Any, view: View) -> None:
    """The curve over its segments."""
    from matplotlib.collections import LineCollection

    rows, columns = _at(view)
    fine = max(view.shape) <= _LINE_CELLS
    ax.imshow(_image(view, 0.30 if fine else 0.85), interpolation="nearest")
    if fine:
        lines, widths = steps(np.stack([columns, rows], 1), min(2.6, 130 / max(view.shape)))
        ax.add_collection(LineCollection(list(lines), colors=view.colours[:-1], linewidths=widths, capstyle="round"))
    _borders(ax, view, view.segment, "white")
    _frame(ax, view)


def kept(ax: Any, view: View) -> None:
    """The keys that are kept, those of one token's segment in full."""
    strength = np.where(view.kept, np.where(view.inside, 1.0, 0.42), np.where(view.inside, 0.22, 0.07))
    ax.imshow(_image(view, strength[:, None]), interpolation="nearest")
    _borders(ax, view, view.inside, INK)
    row, column = (0, *view.token)[-2:]
    ax.plot(column, row, "o", markersize=7, markerfacecolor="white", markeredgecolor=INK, markeredgewidth=1.4, zorder=4)
    _frame(ax, view)


def _plane(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = (1, *shape)[-2:]
    return rows, columns


def _at(view: View) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of the cells along the curve."""
    return (view.cells[:, 0] if len(view.shape) == 2 else np.zeros(len(view.cells), int)), view.cells[:, -1]


def _image(view: View, strength: Any) -> np.ndarray:
    """`(rows, columns, 3)`: the segments' colours, mixed with white."""
    image = np.ones((*_plane(view.shape), 3))
    image[_at(view)] = 1 - strength * (1 - view.colours)
    return image


def _borders(ax: Any, view: View, of: np.ndarray, colour: str) -> None:
    """Lines, beneath the curve, between cells whose values in `of` differ, and around what is not 0 at the grid's edge."""
    from matplotlib.collections import LineCollection

    rows, columns = _at(view)
    grid = np.zeros([side + 2 for side in _plane(view.shape)], int)
    grid[rows + 1, columns + 1] = of
    lines: list[Any] = []
    for down, right in ((1, 0), (0, 1)):
        r, c = np.nonzero(grid[down:, right:] != grid[: grid.shape[0] - down, : grid.shape[1] - right])
        begin = np.stack([c - 1.5 + right, r - 1.5 + down], 1)
        lines += list(np.stack([begin, begin + np.array([down, right])], 1))
    ax.add_collection(LineCollection(lines, colors=colour, linewidths=1.2, capstyle="projecting", zorder=1.5))


def _frame(ax: Any, view: View) -> None:
    rows, columns = _plane(view.shape)
    ax.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), xticks=[], yticks=[])
    ax.set_aspect("equal" if rows >= _FLATTEST * columns else "auto")
    for spine in ax.spines.values():
        spine.set(color=GREY, linewidth=0.6)
