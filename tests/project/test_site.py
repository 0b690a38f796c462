"""The site of docs/: it is built of every page, and a browser shows each without an error, at any width, with a search box."""

import functools
import http.server
import re
import sys
import threading

import pytest
from helpers.browser import browser
from helpers.project import ROOT, run

import dilkit
import dilkit.comm
import dilkit.nn

PAGES = sorted(page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md"))
OVER_THE_EDGE = """
[...document.querySelectorAll("main *")].filter(one => one.getBoundingClientRect().right > innerWidth + 1)
  .filter(one => !one.closest("pre, code, .md-typeset__scrollwrap, .md-sidebar, .md-search"))
  .map(one => one.tagName + ": " + one.textContent.slice(0, 60))
"""
FOUND = "document.querySelectorAll('a.md-search-result__link').length"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """In strict mode: a link or a name that leads nowhere, and a page that the navigation leaves out, are errors."""
    for module in ("mkdocs", "jupytext"):
        pytest.importorskip(module, reason=f"{module}, of the extra docs, is not installed")
    folder = tmp_path_factory.mktemp("site")
    done = run(sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def tab():
    with browser() as one:
        if one is None:
            pytest.skip("no Chromium is installed")
        yield one


@pytest.fixture(scope="module")
def server(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


def test_the_site_is_built_of_every_page(site):
    assert {page.relative_to(site) for page in site.rglob("*.html")} >= set(PAGES)
    api = (site / "api.html").read_text()
    names = {*dilkit.__all__, *dilkit.nn.__all__, *dilkit.comm.__all__} - {"__version__"}
    assert not [name for name in names if not re.search(rf'<h\d id="[\w.]+\.{name}"', api)]
    assert "one softmax" in api or "softmax_j" in api, "docstrings are missing"


def test_nothing_is_loaded_from_elsewhere(site):
    loading = re.compile(
        r'<(?:script|img|iframe)[^>]* src="https?:|<link[^>]* rel="(?:stylesheet|preconnect)"[^>]* href="https?:'
    )
    assert not [page for page in PAGES if loading.search((site / page).read_text())]


def test_a_browser_shows_every_page(tab, server):
    """Narrow and wide, then in the other colours: nothing reaches over the edge but code and tables, and no console complains."""
    for page in PAGES:
        tab.errors.clear()
        tab.open(f"{server}/{page}")
        for width in (390, 1300):
            tab.resize(width)
            tab.until(f"innerWidth == {width} && document.scrollingElement.scrollWidth <= innerWidth", page)
            assert tab.value(OVER_THE_EDGE) == [], (page, width)
        for scheme in ("slate", "default"):
            tab.value(f"document.querySelector('input[data-md-color-scheme={scheme}]').click()")
            tab.until(f"document.body.dataset.mdColorScheme == '{scheme}'", page)
        assert not tab.errors, page


@pytest.mark.parametrize("place", ["server", "file"])
def test_the_search_box_finds(tab, server, site, place):
    tab.errors.clear()
    tab.open(f"{server if place == 'server' else site.as_uri()}/results/cpu.html?q=hilbert")
    assert tab.until(FOUND, place) > 5
    assert not tab.errors
