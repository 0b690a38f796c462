"""Every lesson runs from top to bottom, draws the picture that its page shows, and is a notebook too."""

import json
import re

import pytest
from helpers.project import ROOT

from dilkit.threads import torch_threads
from dilkit.tools.site import lessons

PAGES = lessons.lessons(ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_lesson_runs_and_draws_its_picture(page, tmp_path):
    pytest.importorskip("matplotlib")
    if "import transformers" in (text := page.read_text()) or "from transformers" in text:
        pytest.importorskip("transformers", reason="transformers is not installed (pip install dilkit[transformers])")
    shown = re.findall(r"\]\(\.\./images/lessons/(.+?)\)", text)
    with torch_threads(1):
        assert [path.name for path in lessons.run(page, tmp_path)] == shown
    assert all((ROOT / lessons.PICTURES / name).exists() for name in shown)


def test_a_lesson_is_a_notebook():
    pytest.importorskip("jupytext", reason="jupytext is not installed (pip install dilkit[docs])")
    for page in PAGES:
        cells = json.loads(lessons.notebook(page))["cells"]
        programs = ["".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code"]
        assert programs == lessons.programs(page)
