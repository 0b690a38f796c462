"""The count matrix of a pattern, drawn. matplotlib is imported only when one is."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dilkit.viz.colours import INK, SCALE

if TYPE_CHECKING:
    from torch import Tensor

_PER_ROW = 4


LABELS = ("query", "key", "times seen")


def draw_count(
    figure: Any,
    count: Tensor,
    title: str = "",
    is_causal: bool = False,
    labels: tuple[str, str, str] = LABELS,
    names: Sequence[str] = (),
) -> None:
    """Draw how often each query sees each key into a matplotlib figure, which gets the size that it needs.

    `count` `(heads, seq, seq)` is that of `Pattern.count`: heads stand side by side, and the colour is the count. The future
    of a causal count is left white. `labels`: of the rows, the columns and the colours, for another matrix than that; `names`: of
    the matrices side by side, where they are no heads.

    Example:

        >>> from matplotlib.figure import Figure
        >>> from dilkit import Pattern
        >>> from dilkit.viz import draw_count
        >>> figure = Figure(layout="constrained")
        >>> draw_count(figure, Pattern([16, 64], [1, 4]).count(64, 4), "64 tokens")
        >>> figure.savefig("pattern.png")  # doctest: +SKIP
    """
    heads, columns, most = len(count), min(len(count), _PER_ROW), int(count.max())
    rows = -(-heads // columns)
    lines = textwrap.wrap(title, 22 * columns + 12)
    figure.set_size_inches(1.9 * columns + 1.2, 2.0 * rows + 1.1 + 0.2 * max(len(lines) - 1, 0))
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for ax in axes.flat[heads:]:
        ax.set_visible(False)
    scale = _scale(most)
    for h, matrix in enumerate(count):
        axes.flat[h].set_title(names[h] if names else f"head {h}", fontsize=10, color=INK)
        mesh = _draw_head(axes.flat[h], matrix, is_causal, scale)
    figure.suptitle("\n".join(lines), fontsize=11, color=INK)
    for ax in axes[:, 0]:
        ax.set_ylabel(labels[0], fontsize=9, color=INK)
    for ax in axes[-1]:
        ax.set_xlabel(labels[1], fontsize=9, color=INK)
    style = dict(pad=0.015, aspect=10 * rows + 8, drawedges=most < 12)
    bar = figure.colorbar(mesh, ax=axes, ticks=range(0, most + 1, max(1, most // 8)), **style)
    bar.set_label(labels[2], fontsize=9, color=INK)
    bar.minorticks_off()
    bar.ax.tick_params(length=0, labelsize=8, labelcolor=INK)
    bar.outline.set(color=INK, linewidth=0.6)


def _scale(largest: int) -> dict[str, Any]:
    """Return a colour map with a colour for each count from 0 to `largest`, and its norm."""
    from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap, ListedColormap

    if largest < len(SCALE):
        chosen: Any = ListedColormap(SCALE[: largest + 1])
    else:
        chosen = LinearSegmentedColormap.from_list("counts", SCALE, largest + 1)
    return dict(cmap=chosen, norm=BoundaryNorm([c - 0.5 for c in range(largest + 2)], largest + 1))


def _draw_head(ax: Any, count: Tensor, is_causal: bool, scale: dict[str, Any]) -> Any:
    seq = len(count)
    lines = dict(edgecolors="white", linewidth=0.25) if seq <= 80 else dict(edgecolors="none", linewidth=0.0)
    mesh = ax.pcolormesh(count.numpy(), **scale, **lines, rasterized=seq > 256)
    if is_causal:
        x, y = ([i + 1 for i in range(seq) for _ in range(2)], [i for j in range(seq) for i in (j, j + 1)])
        ax.fill([0, *x, seq], [0, *y, 0], color="white")
    ax.set(xlim=(0, seq), ylim=(seq, 0), aspect="equal")
    ticks = [0, seq] if seq < 8 else [i * seq // 4 for i in range(5)]
    ax.set(xticks=ticks, yticks=ticks)
    ax.tick_params(length=2, labelsize=7, color=INK, labelcolor=INK)
    for spine in ax.spines.values():
        spine.set(color=INK, linewidth=0.6)
    return mesh
