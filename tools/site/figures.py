"""The measured figures of README.md and docs/: read out of the result files in docs/results, never written by hand."""

from __future__ import annotations

import os
from pathlib import Path

from dilkit.tools.report import registry
from dilkit.tools.report.markdown import document_markdown, escaped, table_markdown
from dilkit.tools.results.file import read_json

NOTHING = "Nothing has been measured for this version yet."
MOST_ROWS = 24
"""Of a table that stands on docs/measurements.md beside a link to the whole."""
PAGES = {"costs": "../gpu-costs.md", "ptx": "../gpu-kernels.md"}
"""Of results whose page is not beside them."""


def summary(folder: Path) -> str:
    """The results in `folder` in short, an item of a list for each, with a link to its section of the page of measurements."""
    paths = sorted(sorted(folder.glob("*.json")), key=_place)
    items = [f"* [{path.stem}](#{path.stem}): {registry.sentence_of(path)}" for path in paths]
    return "\n".join(items) or NOTHING


def _place(path: Path) -> int:
    kinds, kind = list(registry.KINDS), read_json(path)["kind"]
    return kinds.index(kind) if kind in kinds else len(kinds)


def measurements(folder: Path) -> str:
    """Every result in `folder`, with a link to its file, in which all samples are."""
    parts = [
        f"## {path.stem}\n\n{_shown(path)}\n\nThe file: [{path.name}](results/{path.name})"
        for path in sorted(folder.glob("*.json"))
    ]
    return "\n\n".join(parts) or NOTHING


def _shown(path: Path) -> str:
    """A document as a whole; of one that has a page of its own the headline, the first table if it is short, and a link."""
    document, page = registry.document_of(path), path.with_suffix(".md")
    if path.stem in PAGES:
        page = path.parent / PAGES[path.stem]
    if not page.exists():
        return document_markdown(document, level=3)
    parts = ["  \n".join(map(escaped, document.headline))]
    parts += [table_markdown(table) for table in document.tables[:1] if len(table.rows) <= MOST_ROWS]
    return "\n\n".join([*parts, f"All measurements: [{page.name}]({os.path.relpath(page, path.parents[1])})"])


def whole(folder: Path, name: str, level: int = 2) -> str:
    """The whole document of the result `name`, its tables under headings of this level."""
    path = folder / f"{name}.json"
    return document_markdown(registry.document_of(path), level=level) if path.exists() else NOTHING


def gpu_suites(folder: Path) -> str:
    """The documents of the GPU suite, one for each device in `folder`; how to make one where there is none."""
    paths = sorted(folder.glob("gpu*.json"))
    if not paths:
        return f"{NOTHING} Where there is a GPU: `dilkit bench --suite gpu`."
    return "\n\n".join(f"## {path.stem}\n\n{document_markdown(registry.document_of(path), level=3)}" for path in paths)
