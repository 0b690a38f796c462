"""The count matrix of a pattern as text: with colours, two rows a line; without, one character a cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dilkit.viz.colours import SCALE

if TYPE_CHECKING:
    from torch import Tensor

SHADES = " .:+*#%@"
"""The characters of counts 0, 1, 2, ...; the last one also stands for more."""

Matrix = Sequence[Sequence[int]]


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
