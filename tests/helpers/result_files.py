"""Committed result files, and values of damaged ones."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from helpers.project import ROOT

FOLDER = ROOT / "docs" / "results"
COMMITTED = sorted(FOLDER.glob("*.json"))


@cache
def _text(path: Path) -> str:
    return path.read_text()


def content(name: str) -> dict[str, Any]:
    return json.loads(_text(FOLDER / f"{name}.json"))


def write(path: Path, content) -> Path:
    path.write_text(json.dumps(content))
    return path
