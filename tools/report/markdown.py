"""Documents as Markdown. The one place where Markdown tables are written."""

import re
from collections.abc import Callable, Iterable, Sequence

from dilkit.tools.report.document import Document, Plot, Section, Table

Picture = Callable[[Plot], str | None]
"""The address of a plot's picture, or None where it is not drawn."""


def markdown(sections: Iterable[Section], picture: Picture, note: str = "") -> str:
    parts = ["# Measurements", *[escaped(note)] * bool(note)]
    for section in sections:
        parts += [f"## {escaped(section.name)}", document_markdown(section.document, picture, level=3)]
        parts.append(f"The command: {escaped(section.command)}")
    return "\n\n".join(parts) + "\n"


def document_markdown(document: Document, picture: Picture = lambda plot: None, level: int = 2) -> str:
    """Return one document, its tables under headings of this level."""
    parts = ["  \n".join(map(escaped, document.headline))]
    for table in document.tables:
        parts += [f"{'#' * level} {escaped(table.title)}", table_markdown(table)]
    parts += [f"![{escaped(plot.title)}]({address})" for plot in document.plots if (address := picture(plot))]
    if document.notes:
        parts.append("\n".join(f"* {escaped(line)}" for line in document.notes))
    if document.method:
        parts.append(escaped(document.method))
    return "\n\n".join(parts)


def table_markdown(table: Table) -> str:
    rows = rows_markdown([[escaped(cell) for cell in row] for row in (table.header, *table.rows)])
    return f"{rows}\n\n{escaped(table.note)}" if table.note else rows


def rows_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells that are Markdown themselves; the first row is its head."""
    names, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *rest))


def escaped(text: str) -> str:
    """Return Markdown that shows `text` as it is: no markup, no HTML, no end of a cell."""
    return re.sub(r"([\\`*_{}\[\]<>&|~#!])", r"\\\1", text)
