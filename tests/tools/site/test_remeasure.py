"""Published results can be measured anew by one command."""

from __future__ import annotations

from helpers.project import ROOT

from dilkit.tools.site import remeasure
from dilkit.tools.site.figures import NOTHING


def test_every_published_result_of_a_cpu_can_be_measured_anew() -> None:
    folder = ROOT / "docs" / "results"
    published = {"cpu" if path.stem.startswith("cpu-") else path.stem for path in folder.glob("*.json")}
    published |= {path.stem for path in folder.glob("*.md") if NOTHING in path.read_text()}
    assert {name for name in published if not name.startswith(("gpu", "kernels", "costs", "ptx"))} == set(remeasure.COMMANDS)
