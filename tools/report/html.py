"""A report as one HTML page that needs nothing else: styles and pictures are inside, no scripts, all texts escaped."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from pathlib import Path

from dilkit.tools.report.document import Plot, Section


def page(sections: Sequence[Section], draw: Callable[[Plot], str] | None, note: str = "") -> str:
    """Return `page.html`, filled in. `draw` makes the SVG of a plot; None: no pictures, and `note` says why."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    def address(plot: Plot) -> str:
        return f"data:image/svg+xml;base64,{base64.b64encode(draw(plot).encode()).decode()}" if draw else ""

    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html").render(sections=sections, draw=draw and address, note=note)
