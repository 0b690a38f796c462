"""A report as one HTML page that needs nothing else: styles and pictures are inside, no scripts, all texts escaped.

The page is the template `page.html`, filled in by jinja2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from dilkit.tools.report.document import Plot, Section, Table

LONG = 24
"""Rows of a table beyond which it is folded away."""
SHORT = 22
"""Characters of a cell up to which it stays in one line."""
_NUMBER = re.compile(r"[-~]?\d|-$|\?$|$")


def page(sections: Sequence[Section], draw: Callable[[Plot, int], str] | None, note: str = "") -> str:
    """Return the page. `draw` makes an `<svg>` element of a plot and its number; None: no pictures, and `note` says why."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    numbers = count()

    def element(plot: Plot) -> Markup:
        return Markup(draw(plot, next(numbers)) if draw else "")

    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined)
    environment.filters.update(numeric=_numeric, verdict=_verdict)
    template = environment.get_template("page.html")
    return template.render(sections=sections, draw=element if draw else None, note=note, long=LONG, short=SHORT)


def _numeric(table: Table, column: int) -> bool:
    """Return True if all cells of a column are numbers, which are aligned to the right."""
    return all(len(row[column]) <= SHORT and _NUMBER.match(row[column]) is not None for row in table.rows)


def _verdict(cell: str) -> str:
    """Return the CSS class of a verdict, which may stand behind a value: "0.79: met"."""
    last = cell.rpartition(": ")[2]
    return "good" if last in ("met", "aim met") else "bad" if last == "short" else "other"
