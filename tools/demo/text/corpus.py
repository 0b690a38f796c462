"""The text that the demo learns from: files, some of which are held out and never trained on."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dilkit.tools.results.kinds.demo import TextFacts

HELD_OUT_SHARE = 1 / 16
SEPARATOR = b"\0"
"""Stands between two files; no text holds it."""
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
_TESTS = {"test", "tests", "idle_test"}
"""Left out, because some distributions do not install them: the same text everywhere."""


@dataclass(frozen=True)
class Corpus:
    """Two disjoint sets of files as bytes: `train` to learn from, `held_out` to be judged on. The names are relative paths."""

    source: str
    train: bytes
    held_out: bytes
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]

    def digest(self) -> str:
        """The same for the same text, cut in the same way."""
        return hashlib.sha256(b"%d " % len(self.train) + self.train + self.held_out).hexdigest()[:16]

    def facts(self) -> TextFacts:
        """The sizes, without the text."""
        sizes = dict(train_bytes=len(self.train), held_out_bytes=len(self.held_out), train_files=len(self.train_files))
        return TextFacts(source=self.source, **sizes, held_out_files=self.held_out_files)


def load_text(paths: Sequence[str] | None, context: int) -> Corpus:
    """The text of `paths`, files and folders; without paths, the Python sources of this Python's standard library.

    Files are held out in the order of the hash of their content, until a sixteenth of all bytes is: the choice depends on
    nothing but the text, and a file that is there twice counts once. Raises ValueError when a path is missing, unreadable
    or no text, or when there is too little for one window of `context` + 1 bytes on either side.
    """
    found = list(_library_files() if paths is None else _named_files(paths))
    by_hash = {hashlib.sha256(content).hexdigest(): (name, content) for name, content in reversed(found)}
    held = _held_out({digest: len(content) for digest, (_, content) in by_hash.items()}, context)
    parts = [[by_hash[d] for d in reversed(by_hash) if (d in held) is wants] for wants in (False, True)]
    train, held_out = (SEPARATOR.join(content for _, content in part) for part in parts)
    source = f"Python {platform.python_version()}'s standard library" if paths is None else ", ".join(paths)
    _check_sizes(source, train, held_out, len(by_hash), context)
    return Corpus(source, train, held_out, *(tuple(name for name, _ in part) for part in parts))


def _held_out(sizes: dict[str, int], context: int) -> set[str]:
    """The first files in the order of their hash, until a sixteenth of all bytes and one window are reached."""
    wanted = max(HELD_OUT_SHARE * sum(sizes.values()), context + 1)
    held: set[str] = set()
    total = 0
    for digest in sorted(sizes):
        if total < wanted:
            held.add(digest)
            total += sizes[digest]
    return held


def _check_sizes(source: str, train: bytes, held_out: bytes, files: int, context: int) -> None:
    if files < 2:
        raise ValueError(
            f"--text: {source} is {files} file{'s' * (files != 1)} with text; at least 2 are needed, as whole files are held out"
        )
    if min(len(train), len(held_out)) <= context:
        raise ValueError(
            f"--text: {source} leaves {len(train):,} bytes to learn from and {len(held_out):,} held out; "
            f"more than one context of {context:,} bytes is needed of each: give more files, or a smaller --context"
        )


def _library_files() -> Iterator[tuple[str, bytes]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if (_NOT_THE_LIBRARY | _TESTS).isdisjoint(name.parts) and (content := path.read_bytes()) and SEPARATOR not in content:
            yield name.as_posix(), content


def _named_files(paths: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """What is named must be text; what merely lies in a named folder may be something else, and is passed over."""
    for text in paths:
        path = Path(text)
        if path.is_dir():
            yield from _folder_files(path)
        else:
            yield text, _read_text(path)


def _folder_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    empty = True
    for root, folders, names in os.walk(folder, onerror=_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _NOT_THE_LIBRARY)
        for name in sorted(names):
            path = Path(root, name)
            if not name.startswith(".") and path.is_file() and (content := _read(path)) and SEPARATOR not in content:
                empty = False
                yield path.as_posix(), content
    if empty:
        raise ValueError(f"--text: folder {str(folder)!r} holds no text file (hidden, empty and binary files are passed over)")


def _read_text(path: Path) -> bytes:
    content = _read(path)
    if not content:
        raise ValueError(f"--text: {str(path)!r} is empty")
    if SEPARATOR in content:
        raise ValueError(f"--text: {str(path)!r} is binary (it holds a zero byte); text is needed")
    return content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        _unreadable(error)


def _unreadable(error: OSError) -> NoReturn:
    raise ValueError(f"--text: {error.filename!r} cannot be read: {error.strerror}") from error
