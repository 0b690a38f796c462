"""Links on the pages lead to a file and a heading that are there, on a source host and on the site of docs/."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from helpers.project import ROOT

DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


@cache
def text(page: Path) -> str:
    return CODE.sub("", page.read_text())


@cache
def anchors(page: Path) -> set[str]:
    """Those that a source host and mkdocs both make of the headings, and those that the page names itself."""
    titles = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower() for title in HEADING.findall(text(page))]
    names = Counter(re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title)) for title in titles)
    return {name for name in names if "--" not in name} | set(re.findall(r'id="(.+?)"', text(page)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for file, anchor in LINK.findall(text(page)):
        target = (page.parent / file).resolve() if file else page
        on_site = target.is_relative_to(DOCS) or not page.is_relative_to(DOCS)
        if not (on_site and target.exists() and (not anchor or anchor in anchors(target))):
            lost.append(f"{file}#{anchor}")
    assert not lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_link_to_the_status_of_gpus_denies_it(page: Path) -> None:
    """The status is generated; a sentence beside it that nothing has run would stay as it was."""
    words = re.findall(r"\[([^\]]*)\]\([^)]*#(?:status|what-runs-on-which-gpu)\)", text(page))
    assert not [one for one in words if re.search(r"\b(no|not|never|nowhere|yet)\b", one)]


def test_the_index_names_every_page() -> None:
    linked = {link for link, _ in LINK.findall(text(DOCS / "index.md")) if link.endswith(".md")}
    assert linked == {page.relative_to(DOCS).as_posix() for page in PAGES if page.is_relative_to(DOCS)} - {"index.md"}
