"""Orders of three dimensions, drawn as one sees them from above and aside."""

from __future__ import annotations

from typing import Any

import numpy as np

from dilkit.tools.commands.order.picture import GREY, INK, View, steps

_ABOVE, _ASIDE = 22, -58
_UP, _ACROSS = (0.93, 0.31, 0.20), (0.0, 0.53, 0.85)
"""How far a step in depth, rows and columns goes up and across, as seen from there."""
_CUBE = 1.04
"""The height of a cube over its width, as seen."""
_FLATTEST = 0.4


def flatness(shape: tuple[int, ...]) -> float:
    """The height of a panel over its width: that of the grid, as seen, where it is flat."""
    return 0.92 * min(1.0, max(_FLATTEST, float(np.dot(_UP, shape) / np.dot(_ACROSS, shape))))


def segments(ax: Any, view: View) -> None:
    """The curve in the colours of its segments."""
    from mpl_toolkits.mplot3d.art3d import Line3DCollection

    lines, widths = steps(view.cells[:, ::-1].astype(float), max(1.0, min(3.5, 60 / max(view.shape))))
    ax.add_collection3d(Line3DCollection(lines, colors=view.colours[:-1], linewidths=widths, capstyle="round"))
    _space(ax, view)


def kept(ax: Any, view: View) -> None:
    """The tokens of one token's segment, large those that are kept."""
    size = (120 / max(view.shape)) ** 2
    for chosen, part, edge in ((view.inside & ~view.kept, 0.1, 0.0), (view.inside & view.kept, 1.0, 0.7)):
        options = dict(alpha=0.5 + 0.5 * (edge > 0), linewidths=edge, edgecolors=INK, depthshade=False)
        ax.scatter(*view.cells[chosen, ::-1].T, s=size * part, c=view.colours[chosen], **options)
    _space(ax, view)


def _space(ax: Any, view: View) -> None:
    depth, rows, columns = view.shape
    ax.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), zlim=(-0.5, depth - 0.5), xticks=[], yticks=[], zticks=[])
    seen = max(np.dot(_ACROSS, view.shape), np.dot(_UP, view.shape) / _CUBE)
    ax.set_box_aspect((columns, rows, depth), zoom=0.82 * np.linalg.norm(view.shape) / seen / flatness(view.shape))
    ax.view_init(_ABOVE, _ASIDE)
    for axis in (ax.xaxis, ax.yaxis, ax.zaxis):
        axis.set_pane_color("#f6f6f4")
        axis.line.set_color(GREY)
    for artist in ax.collections:  # the axes are square: what is flat reaches beyond them
        artist.set_clip_on(False)
        artist.set_in_layout(False)
