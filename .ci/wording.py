"""Refuse docstrings that open without a verb or a noun, and words that readers stumble over. `make lint` calls it.

    python .ci/wording.py [FILE ...]    these files; without any, the docstrings and the pages of the project

In Python it reads strings in triple quotes, in Markdown text that is neither code nor generated. It prints each hit by file and
line, and ends with 1 where there is one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("dilkit", "backends", "comm", "tools", "tests", ".ci")
OPENINGS = re.compile(r"(What|Whether|Where|Which|How|Who|Whose|Of|By|Those|That|As|When)\b")
"""A docstring begins with a verb (Return, Check), a class's with a noun, a boolean's with `True if`."""
WORDS = {
    "anew": "again",
    "farther": "further",
    "in vain": "needlessly",
    "(without a word|in silence)": "silently",
    "one's own": "custom, or your own",
    "stand-ins?": "stub, or substitute",
    "(says|said) of": "lists for, or returns for",
    "is no form": "is not supported",
    "in the place of": "instead of",
    "that (is|are) not there": "that is missing, or that you do not have",
}
"""Expressions, with what to write instead."""
STRING = re.compile(r'"""(.*?)"""', re.DOTALL)
SKIPPED = re.compile(r"^```.*?^```|^<!-- generated.*?^<!-- end -->|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def faults(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the fault of each hit in a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        parts = [(0, SKIPPED.sub(lambda match: re.sub(r"[^\n]", "_", match[0]), text))]
    else:
        parts = [(match.start(1), match[1]) for match in STRING.finditer(text)]
        for start, part in parts:
            if match := OPENINGS.match(part):
                yield text.count("\n", 0, start) + 1, f"a docstring opens with {match[0]!r}: begin with a verb or a noun"
    for start, part in parts:
        for word, better in WORDS.items():
            for match in re.finditer(rf"\b{word.replace(' ', chr(92) + 's+')}\b", part, re.IGNORECASE):
                yield text.count("\n", 0, start + match.start()) + 1, f"{' '.join(match[0].split())!r}: write {better}"


if __name__ == "__main__":
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")]
    modules = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py*") if path.suffix in (".py", ".pyx")]
    paths = [ROOT / name for name in sys.argv[1:]] or sorted([*pages, *modules])
    named = [(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path, path) for path in paths]
    hits = [f"{name}:{line}: {fault}" for name, path in named for line, fault in faults(path)]
    print(*hits, sep="\n", end="\n" if hits else "")
    sys.exit(bool(hits))
