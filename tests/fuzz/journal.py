"""The journal of a run: each step as a line of JSON, on disk before it begins."""

import hashlib
import json
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"


class Journal:
    def __init__(self, path: Path):
        self.path = path
        self.begin()

    def begin(self):
        self.path.write_text("")

    def write(self, step: dict[str, Any]):
        with self.path.open("a") as file:
            file.write(json.dumps(step) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, steps: list[dict[str, Any]]):
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))


def keep(journal: Path, folder: Path) -> Path:
    text = journal.read_text()
    kept = folder / f"found-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    kept.write_text(text)
    return kept
