"""The count matrix of a pattern as a picture, for which matplotlib is imported when one is drawn, and as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SCALE = ("#f2f1ec", "#93d3c1", "#2b93b6", "#2c3d9c", "#641b78", "#b8266a", "#ee6d3b", "#f6c445")
"""The colours of counts 0, 1, 2, ...; the last one also stands for more. Neighbours differ in lightness or in hue."""
INK, GREY = "#33333b", "#6b6b76"
SHADES = " .:+*#%@"
"""The characters of counts 0, 1, 2, ...; the last one also stands for more."""
Matrix = Sequence[Sequence[int]]

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


def count_text(count: Tensor, width: int = 100, colours: bool = False, down: str = "queries") -> str:
    """Show how often each query (down) sees each key (across), as text for a terminal of `width` columns.

    `count` `(heads, seq, seq)` is that of `Pattern.count`: as many heads stand side by side as there is room for. Too long a
    sequence is reduced to blocks, which is said. `colours` are those of the pictures, as escape sequences; `down`: what rows are.

    Example:

        >>> from dilkit import Pattern
        >>> from dilkit.viz import count_text
        >>> print(count_text(Pattern([4, 8], [1, 4]).count(8, 2)))
        down: queries, across: keys
        <BLANKLINE>
        head 0     head 1
        :....      ....
        ....       .:.. .
        ....       ....
        ....       ....
        .   :...       ....
            ....    .  .:..
            ....       ....
            ....       ....
        <BLANKLINE>
        count:   0   . 1   : 2
    """
    block = -(-count.shape[1] // width)
    if block > 1:
        from torch.nn.functional import max_pool2d

        count = max_pool2d(count.float()[None], block, ceil_mode=True)[0].int()
    draw = coloured if colours else shaded
    panels = [[f"head {h}", *draw(matrix.tolist())] for h, matrix in enumerate(count)]
    notes = [f"one cell stands for {block} x {block} tokens and shows the largest count among them"] * (block > 1)
    legend = "   ".join(f"{draw([[c]])[0] or '(blank)'} {c}" for c in range(int(count.max()) + 1))
    lines = [f"down: {down}, across: keys", *notes, *side_by_side(panels, count.shape[2], width), "", f"count: {legend}"]
    return "\n".join(line.rstrip() for line in lines)


def shaded(matrix: Matrix) -> list[str]:
    """Return one line a row, one character a cell."""
    return ["".join(SHADES[min(count, len(SHADES) - 1)] for count in row) for row in matrix]


def coloured(matrix: Matrix) -> list[str]:
    """Return one line for two rows: half blocks in the upper row's colour on the lower row's, so that cells are square."""
    lines = []
    for i in range(0, len(matrix), 2):
        upper, lower = matrix[i], matrix[i + 1] if i + 1 < len(matrix) else None
        cells = []
        for j, count in enumerate(upper):
            below = "\033[49m" if lower is None else f"\033[48;2;{_rgb(lower[j])}m"
            cells.append(f"\033[38;2;{_rgb(count)}m{below}\u2580")
        lines.append("".join(cells) + "\033[0m")
    return lines


def side_by_side(panels: list[list[str]], width: int, room: int, gap: int = 3) -> list[str]:
    """Arrange panels, each a heading and lines `width` columns wide, in rows of as many as `room` columns hold."""
    per_row = max(1, (room + gap) // (width + gap))
    lines = []
    for start in range(0, len(panels), per_row):
        row = panels[start : start + per_row]
        heading = (" " * gap).join(f"{panel[0]:<{width}}" for panel in row).rstrip()
        lines += ["", heading, *((" " * gap).join(parts) for parts in zip(*(panel[1:] for panel in row), strict=True))]
    return lines


def _rgb(count: int) -> str:
    colour = SCALE[min(count, len(SCALE) - 1)]
    return ";".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))
