"""The text that demos learn from: files, some of which are held out and never trained on."""

import hashlib
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilkit import files

HELD_OUT_SHARE, HELD_OUT_WINDOWS, MOST_BYTES = 1 / 16, 8, 4 * 1024**3
SEPARATOR = b"\0"
"""Stands between two files; no text holds it."""
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
"""Folders that are left out; some distributions do not install the tests."""


@dataclass(frozen=True)
class Corpus:
    """Two disjoint sets of files as bytes, to learn from and to be judged on; `facts`: their sizes."""

    train: bytes
    held_out: bytes
    facts: dict[str, Any]

    def digests(self) -> dict[str, str]:
        """Return what ranks compare to know that they have the same text."""
        return {name: hashlib.sha256(text).hexdigest() for name, text in (("train", self.train), ("held out", self.held_out))}

    def held_out_windows(self, context: int) -> Tensor:
        """Return windows evenly spread over the held-out text, `(windows, context + 1)`: at most 8, without overlap."""
        last = len(self.held_out) - (context + 1)
        count = min(HELD_OUT_WINDOWS, len(self.held_out) // (context + 1))
        return _windows(self.held_out, [i * last // max(count - 1, 1) for i in range(count)], context)

    def random_windows(self, generator: torch.Generator, count: int, context: int) -> Tensor:
        return _windows(self.train, torch.randint(len(self.train) - context, (count,), generator=generator).tolist(), context)


def _windows(text: bytes, starts: Sequence[int], context: int) -> Tensor:
    return torch.stack([torch.frombuffer(bytearray(text[x : x + context + 1]), dtype=torch.uint8) for x in starts])


def load_text(paths: Sequence[str] | None, context: int) -> Corpus:
    """Return the text of `paths`, files and folders; without paths, the sources of this Python's standard library.

    Files are held out in the order of their hashes, until a sixteenth of all bytes is; a file that is there twice counts once.
    """
    library = sysconfig.get_path("stdlib")
    try:
        named = [*(_texts(paths, "*", set()) if paths else _texts([library], "*.py", NOT_THE_LIBRARY))]
    except OSError as error:
        raise ValueError(f"--text: {error.filename!r} cannot be read: it {files.why_not(error)}") from error
    by_hash = {hashlib.sha256(content).digest(): (name, content) for name, content in reversed(named)}
    train, held_out = [by_hash[digest] for digest in sorted(by_hash)], list[tuple[str, bytes]]()
    wanted = max(HELD_OUT_SHARE * sum(len(content) for _, content in train), context + 1)
    while train and sum(len(content) for _, content in held_out) < wanted:
        held_out.append(train.pop(0))
    source = ", ".join(paths) if paths else f"Python {platform.python_version()}'s standard library"
    learnt, judged = (SEPARATOR.join(content for _, content in part) for part in (train, held_out))
    if min(len(learnt), len(judged)) <= context:
        sizes = f"leaves {len(learnt):,} bytes to learn from and {len(judged):,} held out"
        raise ValueError(f"--text: {source} {sizes}; more than --context {context:,} of each are needed")
    names = [name.removeprefix(f"{library}/") for name, _ in held_out]
    facts = dict(text=source, train_bytes=len(learnt), held_out_bytes=len(judged), train_files=len(train), held_out_files=names)
    return Corpus(learnt, judged, facts)


def _texts(paths: Sequence[str], pattern: str, left_out: set[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the named files, and those of named folders that are neither hidden nor empty nor binary."""
    for path in map(Path, paths):
        for file in sorted(path.rglob(pattern)) if path.is_dir() else [path]:
            parts = file.relative_to(path).parts
            if file != path and (not file.is_file() or any(part[0] == "." or part in left_out for part in parts)):
                continue
            content = files.read_bytes(file, MOST_BYTES)
            if content and SEPARATOR not in content:
                yield file.as_posix(), content
            elif file == path:
                raise ValueError(f"--text: {str(path)!r} is no text: it is empty, or holds a zero byte")
