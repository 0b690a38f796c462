"""Matrices of small counts as text: with colours, two rows a line; without, one character a cell."""

from __future__ import annotations

from collections.abc import Sequence

from dilkit.viz.colours import SCALE

SHADES = " .:+*#%@"
"""The characters of counts 0, 1, 2, ...; the last one also stands for more."""

Matrix = Sequence[Sequence[int]]


def shaded(matrix: Matrix) -> list[str]:
    """One line a row, one character a cell."""
    return ["".join(SHADES[min(count, len(SHADES) - 1)] for count in row) for row in matrix]


def coloured(matrix: Matrix) -> list[str]:
    """One line for two rows: a half block in the upper row's colour on the lower row's, so that cells are square."""
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
    """Panels, each a heading and lines `width` columns wide, in rows of as many as `room` columns hold."""
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
