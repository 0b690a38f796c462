"""Documents as Markdown. The one place where Markdown tables are written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from dilkit.tools.report.document import Document, Plot, Section, Table

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>&|~#!])")
"""What Markdown would obey instead of showing."""

Picture = Callable[[Plot], str | None]
"""The address of a plot's picture, or None where it is not drawn."""


def markdown(sections: Iterable[Section], picture: Picture, note: str = "") -> str:
    """All sections as a page."""
    parts = ["# Measurements", *[escaped(note)] * bool(note)]
    for section in sections:
        parts += [f"## {escaped(section.name)}", document_markdown(section.document, picture, level=3)]
        parts += [f"The command: {_code(section.command)}"]
    return "\n\n".join(parts) + "\n"


def document_markdown(document: Document, picture: Picture = lambda plot: None, level: int = 2) -> str:
    """One document, its tables under headings of this level."""
    return "\n\n".join(_parts(document, picture, "#" * level))


def _parts(document: Document, picture: Picture, heading: str) -> Iterator[str]:
    yield "  \n".join(map(escaped, document.headline))
    for table in document.tables:
        yield f"{heading} {escaped(table.title)}"
        yield table_markdown(table)
    for plot in document.plots:
        if address := picture(plot):
            yield f"![{escaped(plot.title)}]({address})"
    if document.notes:
        yield "\n".join(f"* {escaped(line)}" for line in document.notes)
    if document.method:
        yield escaped(document.method)


def table_markdown(table: Table) -> str:
    """The rows of a table, and the note below it."""
    rows = rows_markdown([[escaped(cell) for cell in row] for row in (table.header, *table.rows)])
    return f"{rows}\n\n{escaped(table.note)}" if table.note else rows


def rows_markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are Markdown themselves; the first row is its head."""
    names, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *rest))


def escaped(text: str) -> str:
    """`text` as Markdown that shows it as it is: no markup, no HTML, no end of a cell."""
    return _SPECIAL.sub(r"\\\1", text)


def _code(text: str) -> str:
    """`text` as code, between more backticks than it has in a row."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}"
