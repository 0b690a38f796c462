"""The text that demos learn from: files, some of which are held out and never trained on."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilkit import files

HELD_OUT_SHARE, HELD_OUT_WINDOWS = 1 / 16, 8
MOST_BYTES = 4 * 1024**3
"""Limit of one file; the whole text is held in memory."""
SEPARATOR = b"\0"
"""Stands between two files; no text holds it."""
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
"""Folders that are left out; some distributions do not install the tests."""


@dataclass(frozen=True)
class Corpus:
    """Two disjoint sets of files as bytes: `train` to learn from, `held_out` to be judged on; `facts`: their sizes."""

    train: bytes
    held_out: bytes
    facts: dict[str, Any]

    def digest(self) -> str:
        """Return a hash: the same for the same text, cut in the same way."""
        return hashlib.sha256(b"%d " % len(self.train) + self.train + self.held_out).hexdigest()[:16]

    def held_out_windows(self, context: int) -> Tensor:
        """Return windows evenly spread over the held-out text, `(windows, context + 1)`: at most 8, without overlap."""
        data, size = torch.frombuffer(bytearray(self.held_out), dtype=torch.uint8), context + 1
        count = min(HELD_OUT_WINDOWS, len(data) // size)
        starts = [i * (len(data) - size) // max(count - 1, 1) for i in range(count)]
        return torch.stack([data[start : start + size] for start in starts])

    def random_windows(self, seed: int) -> RandomWindows:
        """Return windows to train on, in an order that `seed` decides."""
        return RandomWindows(torch.frombuffer(bytearray(self.train), dtype=torch.uint8), torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class RandomWindows:
    """Windows of a text at random places."""

    text: Tensor
    generator: torch.Generator

    def draw(self, count: int, context: int) -> Tensor:
        """Return the next windows, `(count, context + 1)`."""
        starts = torch.randint(len(self.text) - context, (count,), generator=self.generator)
        return torch.stack([self.text[start : start + context + 1] for start in starts])


def load_text(paths: Sequence[str] | None, context: int) -> Corpus:
    """Return the text of `paths`, files and folders; without paths, the sources of this Python's standard library.

    Files are held out in the order of the hash of their content, until a sixteenth of all bytes is: the choice depends on
    the text alone, and a file that is there twice counts once. Raises ValueError where a path is missing, unreadable
    or no text, or where either side is too short for one window of `context` + 1 bytes.
    """
    library = Path(sysconfig.get_path("stdlib"))
    try:
        named = [*(_named_files(paths) if paths is not None else _texts(library, "*.py", NOT_THE_LIBRARY))]
    except OSError as error:
        raise ValueError(f"--text: {error.filename!r} cannot be read: it {files.why_not(error)}") from error
    by_hash = {hashlib.sha256(content).digest(): (name, content) for name, content in reversed(named)}
    texts = [by_hash[digest] for digest in sorted(by_hash)]
    wanted = max(HELD_OUT_SHARE * sum(len(content) for _, content in texts), context + 1)
    count = sum(total < wanted for total in accumulate((len(content) for _, content in texts), initial=0))
    held_out, train = texts[:count], texts[count:]
    source = f"Python {platform.python_version()}'s standard library" if paths is None else ", ".join(paths)
    learnt, judged = (SEPARATOR.join(content for _, content in part) for part in (train, held_out))
    if min(len(learnt), len(judged)) <= context:
        raise ValueError(
            f"--text: {source}, {len(by_hash)} different files with text, leaves {len(learnt):,} bytes to learn from and "
            f"{len(judged):,} held out; more than one context of {context:,} bytes is needed of each: give more files, "
            "or a smaller --context"
        )
    sizes = dict(train_bytes=len(learnt), held_out_bytes=len(judged), train_files=len(train))
    return Corpus(learnt, judged, dict(text=source, **sizes, held_out_files=[name for name, _ in held_out]))


def _named_files(paths: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the named files, which must be text, and the files of named folders that are text."""
    for name in paths:
        path = Path(name)
        if path.is_dir():
            yield from (((path / inner).as_posix(), content) for inner, content in _texts(path, "*"))
        elif _is_text(content := files.read_bytes(path, MOST_BYTES)):
            yield name, content
        else:
            raise ValueError(f"--text: {name!r} is no text: it is empty, or holds a zero byte")


def _texts(folder: Path, pattern: str, left_out: Collection[str] = ()) -> Iterator[tuple[str, bytes]]:
    """Yield the files in a folder and below by their relative path, without hidden, empty and binary ones."""
    for path in sorted(folder.rglob(pattern)):
        name = path.relative_to(folder)
        skipped = any(part.startswith(".") or part in left_out for part in name.parts)
        if not skipped and path.is_file() and _is_text(content := files.read_bytes(path, MOST_BYTES)):
            yield name.as_posix(), content


def _is_text(content: bytes) -> bool:
    return bool(content) and SEPARATOR not in content
