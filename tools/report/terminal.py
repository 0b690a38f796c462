"""A report as text for the terminal: aligned tables, notes and method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dilkit.tools.console.text import aligned, wrapped
from dilkit.tools.report.document import Document, Section


def text(sections: Iterable[Section]) -> str:
    """All sections, each under the name of its file."""
    return "\n\n".join(f"== {one.name} ({one.kind})\n{document_text(one.document)}" for one in sections)


def document_text(document: Document) -> str:
    """One document."""
    return "\n".join(_lines(document))


def _lines(document: Document) -> Iterator[str]:
    yield from document.headline
    for table in document.tables:
        yield from ("", table.title, *(f"  {line}" for line in aligned([table.header, *table.rows])))
        if table.note:
            yield from wrapped("  ", table.note)
    if document.notes:
        yield ""
    for note in document.notes:
        yield from wrapped("* ", note)
    if document.method:
        yield from ("", *wrapped("", document.method))
