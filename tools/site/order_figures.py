"""The figures of docs/orders.md: every curve through some grids, measured anew whenever the page is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dilkit.orders.comparison import curve_orders
from dilkit.orders.locality import locality_report
from dilkit.tools.commands.order import compactness_cells, distance_cell
from dilkit.tools.report.markdown import rows_markdown

CASES = (
    ((256, 256), 4096),
    ((256, 256), 1500),
    ((250, 250), 1024),
    ((90, 160), 1024),
    ((32, 64, 64), 4096),
    ((33, 45, 80), 1024),
)
"""Grid and segment length: whole blocks; a length that is no tile; rows that no rate divides; a film's; two in space."""
RATES = (4, 8, 16)
WINDOWS = {2: 17, 3: 7}
BLOCK = 128


def locality_table(root: Path) -> str:
    """One row a grid, segment length and curve."""
    names = ("near 48", "diameter", "near 48, shifted", "diameter, shifted", *(f"r={rate}" for rate in RATES), "blocks")
    return rows_markdown([("grid, segment", "curve", *names), *_rows()])


def _rows() -> Iterator[tuple[str, ...]]:
    for shape, length in CASES:
        case = f"{' x '.join(map(str, shape))}, {length:,}"
        for order in curve_orders(shape, length, block=BLOCK).values():
            report = locality_report(order, length, RATES, window=WINDOWS[len(shape)], block=BLOCK)
            compact = [cell for part in (report.aligned, report.shifted) for cell in compactness_cells(part)[1:]]
            yield case, report.name, *compact, *map(distance_cell, report.kept), f"{report.active_blocks:.2f}"
            case = ""
