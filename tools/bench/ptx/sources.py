"""What the kernels of a backend are made of: where that is as it was, so is what was seen of them."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

import dilkit.backends

FOLDER = Path(dilkit.backends.__path__[0])
SOURCES = {
    "cupy_raw": ("cuda/kernels/*.cu*", "cuda/table.py", "cuda/scores.py", "cuda/steps.py"),
    "triton": ("triton/*.py",),
    "numba_cuda": ("numba/*.py",),
}
"""By backend, kernels and what decides with which constants they are compiled."""
NO_SOURCE = "backend.py"
"""In which a backend says what it takes, and for whom."""
COMMENTS = {
    ".py": re.compile(r'^\s*""".*?"""$|(?:^|\s)#[^\n]*', re.DOTALL | re.MULTILINE),
    "": re.compile(r"/\*.*?\*/", re.DOTALL),
}
"""By the ending of a file; docstrings are such, too."""
DIGITS = 12


@cache
def digest(backend: str) -> str:
    """Of the files that hold the kernels of `backend`, without comments."""
    paths = sorted(path for pattern in SOURCES[backend] for path in FOLDER.glob(pattern) if path.name != NO_SOURCE)
    return hashlib.sha256("\0".join(f"{path.name}\0{_code(path)}" for path in paths).encode()).hexdigest()[:DIGITS]


def _code(path: Path) -> str:
    comment = COMMENTS.get(path.suffix, COMMENTS[""])
    return " ".join(comment.sub(" ", path.read_text()).split())
