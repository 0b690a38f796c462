"""The table of docs/transformers.md: classes of models, and whether they compute with dilkit."""

from __future__ import annotations

import json
import re
from pathlib import Path

from dilkit.tools.report.markdown import rows_markdown

EXAMINED = Path("tests", "families", "examined.json")
OTHER_LAYERS = "beside attention, layers of it mix tokens by convolution, recurrence or linear attention"


def family_table(root: Path) -> str:
    """Return a row for each verdict and reason: the classes of models that `tests/families/run.py` tried, and their families."""
    tried = json.loads((root / EXAMINED).read_text())
    groups: dict[str, dict[str, list[dict[str, str]]]] = {}
    for one in tried["classes"]:
        reason = OTHER_LAYERS if one["every_layer_asks"] is False else _reason(one["verdict"], one["reason"])
        groups.setdefault(one["verdict"], {}).setdefault(reason, []).append(one)
    rows = [("", "reason", "classes", "families")]
    for verdict, by_reason in sorted(groups.items(), key=lambda group: (-sum(map(len, group[1].values())), group[0])):
        for reason, classes in sorted(by_reason.items(), key=lambda pair: -len(pair[1])):
            families = sorted({f"`{one['family']}`" for one in classes})
            rows.append((verdict, reason, str(len(classes)), ", ".join(families)))
    versions = ", ".join(f"{name} {version}" for name, version in tried["versions"].items())
    return f"{len(tried['classes'])} classes, with {versions}:\n\n{rows_markdown(rows)}"


def _reason(verdict: str, reason: str) -> str:
    """Return a reason without names and numbers that differ from class to class."""
    if verdict == "not tried":
        return "a package is missing" if reason.startswith("ImportError") else "no tiny model of it ran with `eager` attention"
    words = re.sub(r"\b(a )?tensor \([\d, ]*\)", "a tensor", reason.partition(";")[0])
    return re.sub(r"\d[\d,]*", "n", re.sub(r"\b\w+(Attention|Config|Model)\b", "it", words)).strip()
