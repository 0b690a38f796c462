"""The measured figures of README.md and docs/: read out of the result files in docs/results, never written by hand."""

from __future__ import annotations

import os
from pathlib import Path

from dilkit.tools.report import registry
from dilkit.tools.report.markdown import document_markdown

NOTHING = "Nothing has been measured for this version yet."
PAGES = {"costs": "../gpu-costs.md", "ptx": "../gpu-kernels.md"}
"""Pages of results that are not beside them."""
SIDE_BY_SIDE = ("cpu",)
"""Suites that have a file for each machine, shown together."""


def sentence(folder: Path, name: str) -> str:
    """Return the sentence on the result `name`."""
    path = folder / f"{name}.json"
    return registry.sentence_of(path) if path.exists() else NOTHING


def summary(folder: Path) -> str:
    """Return a list item for each result in `folder`, with a link to its page, or to its section of the page of measurements."""
    kinds = list(registry.KINDS)
    sections = sorted(_sections(folder).items(), key=lambda section: kinds.index(registry.read(section[1][0]).kind))
    links = {name: _page(folder, name) or f"#{name}" for name, _ in sections}
    return "\n".join(f"* [{name}]({links[name]}): {registry.sentence_of(*paths)}" for name, paths in sections) or NOTHING


def _sections(folder: Path) -> dict[str, list[Path]]:
    sections: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.json")):
        suite = path.stem.partition("-")[0]
        sections.setdefault(suite if suite in SIDE_BY_SIDE else path.stem, []).append(path)
    return sections


def _page(folder: Path, name: str) -> str | None:
    """Return the address of the page of a result, as seen from that of measurements; None where it has none."""
    suite = name.partition("-")[0]
    page = folder / PAGES.get(suite, f"{suite}.md")
    return os.path.relpath(page, folder.parent) if page.exists() else None


def measurements(folder: Path) -> str:
    """Return every result in `folder` that has no page of its own, with a link to its file."""
    parts = []
    for name, (path, *_) in _sections(folder).items():
        if not _page(folder, name):
            document = document_markdown(registry.document_of(path), level=3)
            parts += [f"## {name}", document, f"The file: [{path.name}](results/{path.name})"]
    return "\n\n".join(parts) or NOTHING


def whole(folder: Path, name: str, level: int = 2) -> str:
    """Return the document of the result `name`, its tables under headings of this level."""
    paths = _sections(folder).get(name)
    return document_markdown(registry.document_of(*paths), level=level) if paths else NOTHING


def gpu_suites(folder: Path) -> str:
    """Return the documents of the GPU suite, one for each device in `folder`; the way to make one where there is none."""
    paths = sorted(folder.glob("gpu*.json"))
    if not paths:
        return f"{NOTHING} Where there is a GPU: `dilkit bench --suite gpu`."
    return "\n\n".join(f"## {path.stem}\n\n{document_markdown(registry.document_of(path), level=3)}" for path in paths)
