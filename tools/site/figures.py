"""The measured figures of README.md and docs/: read out of the result files in docs/results, never written by hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dilkit.tools.report import registry
from dilkit.tools.report.markdown import document_markdown, escaped, table_markdown
from dilkit.tools.results.file import read_json

NOTHING = "Nothing has been measured for this version yet."
MOST_ROWS = 24
"""Rows of a table that stands on docs/measurements.md beside a link to the whole."""
PAGES = {"costs": "../gpu-costs.md", "ptx": "../gpu-kernels.md"}
"""Pages of results that are not beside them."""
SIDE_BY_SIDE = ("cpu",)
"""Suites that have a file for each machine, shown together."""


def summary(folder: Path) -> str:
    """The results in `folder` in short, an item of a list for each, with a link to its section of the page of measurements."""
    sections = sorted(_sections(folder).items(), key=lambda section: _place(section[1][0]))
    items = [f"* [{name}](#{name}): {registry.sentence_of(*paths)}" for name, paths in sections]
    return "\n".join(items) or NOTHING


def _sections(folder: Path) -> dict[str, list[Path]]:
    """Result files by the name of their section: that of the file, or of the suite that has a file for each machine."""
    sections: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.json")):
        suite = path.stem.partition("-")[0]
        sections.setdefault(suite if suite in SIDE_BY_SIDE else path.stem, []).append(path)
    return sections


def _place(path: Path) -> int:
    kinds, kind = list(registry.KINDS), read_json(path)["kind"]
    return kinds.index(kind) if kind in kinds else len(kinds)


def measurements(folder: Path) -> str:
    """Every result in `folder`, with a link to its file, in which all samples are."""
    parts = []
    for name, paths in _sections(folder).items():
        links = ", ".join(f"[{path.name}](results/{path.name})" for path in paths)
        parts.append(f"## {name}\n\n{_shown(name, paths)}\n\nThe file{'s' * (len(paths) > 1)}: {links}")
    return "\n\n".join(parts) or NOTHING


def _shown(name: str, paths: Sequence[Path]) -> str:
    """A document as a whole; of one that has a page of its own the headline, the first table if it is short, and a link."""
    document, folder = registry.document_of(*paths), paths[0].parent
    page = folder / PAGES.get(name, f"{name}.md")
    if not page.exists():
        return document_markdown(document, level=3)
    parts = ["  \n".join(map(escaped, document.headline))]
    parts += [table_markdown(table) for table in document.tables[:1] if len(table.rows) <= MOST_ROWS]
    return "\n\n".join([*parts, f"All measurements: [{page.name}]({os.path.relpath(page, folder.parent)})"])


def whole(folder: Path, name: str, level: int = 2) -> str:
    """The whole document of the result `name`, its tables under headings of this level."""
    paths = _sections(folder).get(name)
    return document_markdown(registry.document_of(*paths), level=level) if paths else NOTHING


def gpu_suites(folder: Path) -> str:
    """The documents of the GPU suite, one for each device in `folder`; how to make one where there is none."""
    paths = sorted(folder.glob("gpu*.json"))
    if not paths:
        return f"{NOTHING} Where there is a GPU: `dilkit bench --suite gpu`."
    return "\n\n".join(f"## {path.stem}\n\n{document_markdown(registry.document_of(path), level=3)}" for path in paths)
