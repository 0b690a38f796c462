"""Links on the pages lead to a file and a heading that are there, on a source host and on the site of docs/."""

import re
from collections import Counter
from functools import cache

import pytest
from helpers.project import ROOT

DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


@cache
def text(page):
    return CODE.sub("", page.read_text())


@cache
def anchors(page):
    titles = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower() for title in HEADING.findall(text(page))]
    names = Counter(re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title)) for title in titles)
    return {name for name in names if "--" not in name} | set(re.findall(r'id="(.+?)"', text(page)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    lost = []
    for file, anchor in LINK.findall(text(page)):
        target = (page.parent / file).resolve() if file else page
        on_site = target.is_relative_to(DOCS) or not page.is_relative_to(DOCS)
        if not (on_site and target.exists() and (not anchor or anchor in anchors(target))):
            lost.append(f"{file}#{anchor}")
    assert not lost


def test_the_index_names_every_page():
    linked = {link for link, _ in LINK.findall(text(DOCS / "index.md")) if link.endswith(".md")}
    assert linked == {page.relative_to(DOCS).as_posix() for page in PAGES if page.is_relative_to(DOCS)} - {"index.md"}


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md", "docs/adding-a-backend.md", "docs/backends.md"])
def test_paths_that_a_page_names_are_there(page):
    """Paths of the packages and of tests, such as `dilkit/op/attend.py`; the backend `dense` is the reader's to write."""
    named = re.findall(r"`((?:dilkit|backends|comm|tools|tests)/[\w./-]+)`", (ROOT / page).read_text())
    assert named
    assert [path for path in named if not (ROOT / path).exists() and "dense" not in path] == []
