"""A report as one HTML page that needs nothing else: styles and pictures are inside, no scripts, all texts escaped."""

import base64
from collections.abc import Callable, Iterator, Sequence
from html import escape

from dilkit.tools.report.document import Plot, Section

HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>dilkit: measurements</title>
<style>
:root { color-scheme: light dark; }
body { max-width: 76rem; margin: 0 auto; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
div { overflow-x: auto; }
figure { display: inline-block; width: 34rem; max-width: 100%; margin: 1rem 0; }
img { width: 100%; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .3rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid gray; }
</style>
<h1>Measurements</h1>"""


def page(sections: Sequence[Section], draw: Callable[[Plot], str] | None, note: str = "") -> str:
    """Return the page. `draw` makes the SVG of a plot; None: no pictures, and `note` says why."""
    return "\n".join([HEAD, f"<p>{escape(note)}</p>", *(line for one in sections for line in _lines(one, draw)), "</html>\n"])


def _lines(section: Section, draw: Callable[[Plot], str] | None) -> Iterator[str]:
    document = section.document
    yield f"<h2>{escape(section.name)} ({escape(section.kind)})</h2>"
    yield from (f"<p>{escape(line)}</p>" for line in document.headline)
    for table in document.tables:
        yield f'<h3>{escape(table.title)}</h3>\n<div tabindex="0"><table>'
        yield _row(table.header, 'th scope="col"')
        yield from (_row(row, "td") for row in table.rows)
        yield f"</table></div>\n<p>{escape(table.note)}</p>"
    for plot, svg in [(plot, draw(plot)) for plot in document.plots] if draw else ():
        title, picture = escape(plot.title), base64.b64encode(svg.encode()).decode()
        yield f'<figure><figcaption>{title}</figcaption><img alt="{title}" src="data:image/svg+xml;base64,{picture}"></figure>'
    yield f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in document.notes)}</ul>"
    yield f"<p>{escape(document.method)}</p>\n<p><code>{escape(section.command)}</code></p>"


def _row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag[:2]}>' for cell in cells)}</tr>"
