"""The table of docs/transformers.md: what became of every class of models that `tests/families/run.py` tried."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from dilkit.tools.report.markdown import rows_markdown

FILE = Path("tests", "families", "examined.json")
OTHER_LAYERS = "beside attention, layers of it mix tokens by convolution, recurrence or linear attention"
NUMBERS = re.compile(r"\d[\d,]*")


def family_table(root: Path) -> str:
    """One row a verdict, and a reason: how many classes, and of which families."""
    tried = json.loads((root / FILE).read_text())
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for one in tried["classes"]:
        reason = OTHER_LAYERS if one["every_layer_asks"] is False else _kind(one["verdict"], one["reason"])
        groups.setdefault((one["verdict"], reason), []).append(one)
    ordered = sorted(groups.items(), key=lambda group: (-_size(groups, group[0][0]), group[0][0], -len(group[1])))
    rows = [(verdict, reason, str(len(of_kind)), _families(of_kind)) for (verdict, reason), of_kind in ordered]
    versions = ", ".join(f"{name} {version}" for name, version in tried["versions"].items())
    table = rows_markdown([("", "reason", "classes", "families"), *rows])
    return f"{len(tried['classes'])} classes, with {versions}:\n\n{table}"


def _kind(verdict: str, reason: str) -> str:
    """A reason without what differs from class to class."""
    if verdict == "not tried":
        return "a package is missing" if reason.startswith("ImportError") else "no tiny model of it ran with `eager` attention"
    words = re.sub(r"\b(a )?tensor \([\d, ]*\)", "a tensor", reason.partition(";")[0])
    return NUMBERS.sub("n", re.sub(r"\b\w+(Attention|Config|Model)\b", "it", words)).strip()


def _size(groups: dict[tuple[str, str], list[dict[str, str]]], verdict: str) -> int:
    return sum(len(of_kind) for (name, _), of_kind in groups.items() if name == verdict)


def _families(classes: Iterable[dict[str, str]]) -> str:
    return ", ".join(sorted({f"`{one['family']}`" for one in classes}))
