"""The text that the demo learns from: files, some of which are held out and never trained on."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dilkit import files
from dilkit.files import why_not
from dilkit.tools.demo.text.record import TextFacts

HELD_OUT_SHARE = 1 / 16
MOST_BYTES = 4 * 1024**3
"""Of one file; the whole text is held in memory."""
SEPARATOR = b"\0"
"""Stands between two files; no text holds it."""
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
"""Tests are left out because some distributions do not install them: the same text everywhere."""
_Files = list[tuple[str, bytes]]


@dataclass(frozen=True)
class Corpus:
    """Two disjoint sets of files as bytes: `train` to learn from, `held_out` to be judged on."""

    train: bytes
    held_out: bytes
    facts: TextFacts

    def digest(self) -> str:
        """The same for the same text, cut in the same way."""
        return hashlib.sha256(b"%d " % len(self.train) + self.train + self.held_out).hexdigest()[:16]


def load_text(paths: Sequence[str] | None, context: int) -> Corpus:
    """The text of `paths`, files and folders; without paths, the Python sources of this Python's standard library.

    Files are held out in the order of the hash of their content, until a sixteenth of all bytes is: the choice depends on
    nothing but the text, and a file that is there twice counts once. Raises ValueError when a path is missing, unreadable
    or no text, or when there is too little for one window of `context` + 1 bytes on either side.
    """
    try:
        files = list(_library_files() if paths is None else _named_files(paths))
    except OSError as error:
        raise ValueError(f"--text: {error.filename!r} cannot be read: it {why_not(error)}") from error
    by_hash = {hashlib.sha256(content).digest(): (name, content) for name, content in reversed(files)}
    train, held_out = _split([by_hash[digest] for digest in sorted(by_hash)], context)
    source = f"Python {platform.python_version()}'s standard library" if paths is None else ", ".join(paths)
    texts = [SEPARATOR.join(content for _, content in part) for part in (train, held_out)]
    sizes = dict(train_bytes=len(texts[0]), held_out_bytes=len(texts[1]), train_files=len(train))
    facts = TextFacts(source=source, **sizes, held_out_files=tuple(name for name, _ in held_out))
    if min(facts.train_bytes, facts.held_out_bytes) <= context:
        raise ValueError(
            f"--text: {source}, {len(by_hash)} different files with text, leaves {facts.train_bytes:,} bytes to learn from and "
            f"{facts.held_out_bytes:,} held out; more than one context of {context:,} bytes is needed of each: give more files, "
            "or a smaller --context"
        )
    return Corpus(texts[0], texts[1], facts)


def _split(texts: _Files, context: int) -> tuple[_Files, _Files]:
    """Those to learn from, and those held out: the first ones, until a sixteenth of all bytes and one window are reached."""
    wanted = max(HELD_OUT_SHARE * sum(len(content) for _, content in texts), context + 1)
    count = total = 0
    while total < wanted and count < len(texts):
        total += len(texts[count][1])
        count += 1
    return texts[count:], texts[:count]


def _library_files() -> Iterator[tuple[str, bytes]]:
    root = Path(sysconfig.get_path("stdlib"))
    for name, content in _texts(root, "*.py"):
        if _NOT_THE_LIBRARY.isdisjoint(name.parts):
            yield name.as_posix(), content


def _named_files(paths: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """What is named must be text; what merely lies in a named folder may be something else, and is passed over."""
    for text in paths:
        path = Path(text)
        if path.is_dir():
            yield from (((path / name).as_posix(), content) for name, content in _texts(path, "*"))
        elif _is_text(content := files.read_bytes(path, MOST_BYTES)):
            yield text, content
        else:
            raise ValueError(f"--text: {text!r} is no text: it is empty, or holds a zero byte")


def _texts(folder: Path, pattern: str) -> Iterator[tuple[Path, bytes]]:
    """The files in a folder and below by their relative path; not those that are hidden, empty or binary."""
    for path in sorted(folder.rglob(pattern)):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        if not hidden and path.is_file() and _is_text(content := files.read_bytes(path, MOST_BYTES)):
            yield name, content


def _is_text(content: bytes) -> bool:
    return bool(content) and SEPARATOR not in content
