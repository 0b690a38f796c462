"""The site of docs/."""

import re
import sys

import pytest
from helpers.project import ROOT, run

import dilkit
import dilkit.comm
import dilkit.nn

PAGES = sorted(page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md"))
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
