"""What a CUDA kernel is compiled from: where that is as it was, so is what the compiler makes of it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import cache

from dilkit.backends.cuda.compile import SOURCES

INCLUDE = re.compile(r'#include "(\w+\.cuh)"')
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
DIGITS = 12


def digest(source: str, options: Iterable[str]) -> str:
    """Of the file `source`, of those that it includes, without comments, and of the options of the compiler."""
    return _sha256("\0".join((_digest_of_file(source), *options)))[:DIGITS]


@cache
def _digest_of_file(name: str) -> str:
    text = COMMENT.sub(" ", (SOURCES / name).read_text())
    included = (_digest_of_file(found) for found in INCLUDE.findall(text))
    return _sha256("\0".join((" ".join(text.split()), *included)))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
