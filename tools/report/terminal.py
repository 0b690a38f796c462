"""A report as text for the terminal: aligned tables, notes and method."""

from collections.abc import Iterable

from dilkit.tools.console.text import aligned, wrapped
from dilkit.tools.report.document import Document, Section


def text(sections: Iterable[Section]) -> str:
    return "\n\n".join(f"== {one.name} ({one.kind})\n{document_text(one.document)}" for one in sections)


def document_text(document: Document) -> str:
    lines = [*document.headline]
    for table in document.tables:
        lines += ["", table.title, *(f"  {line}" for line in aligned([table.header, *table.rows]))]
        lines += wrapped("  ", table.note) if table.note else []
    if document.notes:
        lines += ["", *(line for note in document.notes for line in wrapped("* ", note))]
    if document.method:
        lines += ["", *wrapped("", document.method)]
    return "\n".join(lines)
