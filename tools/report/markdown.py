"""A report as text for the terminal, and as Markdown. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from dilkit.tools.console.text import aligned, wrapped
from dilkit.tools.report.document import Plot, Section, Table

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>&|~#!])")
"""What Markdown would obey instead of showing."""


def text(sections: Iterable[Section]) -> str:
    """All sections for the terminal: tables, notes and method."""
    return "\n\n".join("\n".join(_section_lines(section)) for section in sections)


def _section_lines(section: Section) -> list[str]:
    told = section.told
    lines = [f"== {section.name} ({section.kind})", *told.headline]
    for table in told.tables:
        lines += ["", table.title, *(f"  {line}" for line in aligned([table.header, *table.rows]))]
    notes = [line for note in told.notes for line in wrapped("* ", note)]
    return [*lines, *[""] * bool(notes), *notes, *[""] * bool(told.method), *(wrapped("", told.method) if told.method else [])]


def markdown(sections: Iterable[Section], picture: Callable[[Plot], str | None], note: str = "") -> str:
    """All sections as a Markdown page; `picture` gives the address of a plot's picture, or None where it is not drawn."""
    parts = ["# Measurements", *[escaped(note)] * bool(note)]
    for section in sections:
        told = section.told
        parts += [f"## {escaped(section.name)}", "  \n".join(map(escaped, told.headline))]
        for table in told.tables:
            parts += [f"### {escaped(table.title)}", *_table(table)]
        parts += [f"![{escaped(plot.title)}]({address})" for plot in told.plots if (address := picture(plot))]
        parts += ["\n".join(f"* {escaped(line)}" for line in told.notes)] * bool(told.notes)
        parts += [escaped(told.method)] * bool(told.method)
        parts += [f"The command: {_code(section.command)}"]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> list[str]:
    header, *rows = ([escaped(cell) for cell in line] for line in (table.header, *table.rows))
    lines = [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)]
    return ["\n".join(lines), *[escaped(table.note)] * bool(table.note)]


def escaped(text: str) -> str:
    """`text` as Markdown that shows it as it is: no markup, no HTML, no cell's end."""
    return _SPECIAL.sub(r"\\\1", text)


def _code(text: str) -> str:
    """`text` as code, between more backticks than it has in a row."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}"
