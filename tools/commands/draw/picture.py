"""The count matrix as a picture. matplotlib is imported only when one is drawn."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilkit.tools.console.terminal import COLOURS

if TYPE_CHECKING:
    from torch import Tensor

_INK, _FUTURE, _LINES = "#33333b", "#ffffff", "#ffffff"
_PER_ROW = 4


def save_picture(count: Tensor, title: str, path: Path, is_causal: bool = False) -> None:
    """Draw `count` `(heads, seq, seq)`, heads side by side, colour = count; in a causal one the future is left white."""
    from dilkit.tools.report.picture import new_figure, save

    heads, columns = len(count), min(len(count), _PER_ROW)
    rows = -(-heads // columns)
    colours, norm = _scale(int(count.max()))
    with new_figure(2.75 * columns + 1.2, 2.85 * rows + 0.75) as figure:
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for h, ax in enumerate(axes.flat):
            if h < heads:
                mesh = _draw_head(ax, count[h], h, colours, norm, is_causal)
            else:
                ax.set_visible(False)
        _label(figure, axes, mesh, int(count.max()), title, columns)
        save(figure, path, dpi=200)


def _scale(largest: int) -> tuple[Any, Any]:
    """A colour for each count from 0 to `largest`, and the bins that they fill."""
    from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap, ListedColormap

    if largest < len(COLOURS):
        chosen: Any = ListedColormap(COLOURS[: largest + 1])
    else:
        chosen = LinearSegmentedColormap.from_list("counts", COLOURS, largest + 1)
    return chosen, BoundaryNorm([c - 0.5 for c in range(largest + 2)], largest + 1)


def _draw_head(ax: Any, count: Tensor, head: int, colours: Any, norm: Any, is_causal: bool) -> Any:
    seq = len(count)
    cells = count.numpy()
    lines = 0.35 if seq <= 80 else 0.0
    style = dict(edgecolors=_LINES if lines else "none", linewidth=lines, rasterized=seq > 256)
    mesh = ax.pcolormesh(cells, cmap=colours, norm=norm, **style)
    if is_causal:
        x, y = ([i + 1 for i in range(seq) for _ in range(2)], [i for j in range(seq) for i in (j, j + 1)])
        ax.fill([0, *x, seq], [0, *y, 0], color=_FUTURE)
    ax.set(xlim=(0, seq), ylim=(seq, 0), aspect="equal")
    ax.set_title(f"head {head}", fontsize=10, color=_INK)
    ticks = [0, seq] if seq < 8 else [i * seq // 4 for i in range(5)]
    ax.set(xticks=ticks, yticks=ticks)
    ax.tick_params(length=2, labelsize=7, color=_INK, labelcolor=_INK)
    for spine in ax.spines.values():
        spine.set(color=_INK, linewidth=0.6)
    return mesh


def _label(figure: Any, axes: Any, mesh: Any, largest: int, title: str, columns: int) -> None:
    figure.suptitle("\n".join(textwrap.wrap(title, 34 * columns + 12)), fontsize=11, color=_INK)
    for ax in axes[:, 0]:
        ax.set_ylabel("query", fontsize=9, color=_INK)
    for ax in axes[-1]:
        ax.set_xlabel("key", fontsize=9, color=_INK)
    style = dict(pad=0.015, aspect=10 * len(axes) + 8, drawedges=largest < 12)
    bar = figure.colorbar(mesh, ax=axes, ticks=range(0, largest + 1, max(1, largest // 8)), **style)
    bar.set_label("times seen", fontsize=9, color=_INK)
    bar.minorticks_off()
    bar.ax.tick_params(length=0, labelsize=8, labelcolor=_INK)
    bar.outline.set(color=_INK, linewidth=0.6)
