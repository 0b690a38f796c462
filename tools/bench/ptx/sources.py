"""Digests of code: results of kernels hold as long as the code that they were seen of."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import dilkit.backends

FOLDER = Path(dilkit.backends.__path__[0])
SOURCES = {
    "cupy_raw": ("cuda/kernels/*.cu*", "cuda/table.py", "cuda/scores.py", "cuda/steps.py"),
    "triton": ("triton/*.py",),
    "numba_cuda": ("numba/*.py",),
}
"""Files of kernels, and of the constants with which they are compiled, by backend."""
NO_SOURCE = "backend.py"
"""File that holds what a backend can compute, and for whom."""
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
DIGITS = 12


@cache
def digest(backend: str) -> str:
    """Return the digest of the kernels of `backend`."""
    paths = (path for pattern in SOURCES[backend] for path in FOLDER.glob(pattern) if path.name != NO_SOURCE)
    return code_digest(paths)


def code_digest(paths: Iterable[Path], *more: str) -> str:
    """Return a digest of code in Python, C and CUDA, and of `more` texts.

    Comments, docstrings, imports, layout, and the names of files do not count. Nor does the place of a statement of Python
    among those at the top of all files: definitions may move from file to file.
    """
    pieces = sorted(piece for path in paths for piece in _pieces(path))
    return hashlib.sha256("\0".join((*pieces, *more)).encode()).hexdigest()[:DIGITS]


def _pieces(path: Path) -> Iterator[str]:
    text = path.read_text()
    if path.suffix == ".py":
        yield from (_written(statement) for statement in ast.parse(text).body if not _is_silent(statement))
    else:
        yield " ".join(COMMENT.sub(" ", text).split())


def _written(node: object) -> str:
    """Write a syntax tree alike for all versions of Python: `ast.dump` is not."""
    if isinstance(node, list):
        return f"[{' '.join(_written(one) for one in node if not _is_silent(one))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = (f"{name}={_written(value)}" for name, value in ast.iter_fields(node) if value not in (None, []))
    return f"{type(node).__name__}({' '.join(fields)})"


def _is_silent(node: object) -> bool:
    """Return True for an import or a docstring."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.Import | ast.ImportFrom)
