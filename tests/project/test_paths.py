"""The files that the pages for developers name are there."""

import re

import pytest
from helpers.project import ROOT


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md", "docs/adding-a-backend.md", "docs/backends.md"])
def test_paths_that_a_page_names_are_there(page):
    """Paths of the packages and of tests, such as `dilkit/op/rules.py`; the backend `dense` is the reader's to write."""
    named = re.findall(r"`((?:dilkit|backends|comm|tools|tests)/[\w./-]+)`", (ROOT / page).read_text())
    assert named
    assert [path for path in named if not (ROOT / path).exists() and "dense" not in path] == []
