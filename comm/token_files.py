"""Files of tokens, mapped into memory: `.npy` files, and raw files of numbers."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from dilkit.checks import check_type
from dilkit.files import check_regular

_NPY = b"\x93NUMPY"
_HEADER_LOCK = threading.Lock()
"""Held while numpy parses a header: in Python 3.11 two threads that parse at once can end in a SystemError (recursion depth)."""
_MALFORMED = (
    *(ValueError, TypeError, EOFError, SyntaxError, MemoryError, OverflowError, RecursionError),
    TokenError,  # what numpy lets through of a header with an open bracket
)


def mapped_tokens(path: str | Path, dtype: Any) -> Any:
    """The tokens in a file, `(seq, ...)`. Raises TypeError or ValueError for a path, a file or a dtype that does not fit."""
    check_type("path", path, (str, os.PathLike), "a path is needed")
    path = Path(path)
    check_regular(path, path.stat(), most=sys.maxsize)
    is_npy = path.suffix == ".npy"
    if is_npy and dtype is not None:
        raise ValueError(f"dtype={dtype!r} is for raw files; path={str(path)!r} says itself what is in it")
    if not is_npy and dtype is None:
        raise ValueError(f"path={str(path)!r} is no .npy file; say what is in it, as dtype='uint16'")
    return _mapped_npy(path) if is_npy else _mapped_numbers(path, dtype)


def _mapped_npy(path: Path) -> Any:
    try:
        with _HEADER_LOCK, np.errstate(over="ignore"):  # a size that overflows is refused as one that the file does not have
            tokens: Any = np.lib.format.open_memmap(path, mode="r")
    except _MALFORMED as error:
        raise ValueError(f"path={str(path)!r} cannot be read as .npy: {error}") from None
    _check_numbers(path, tokens.dtype, tokens.shape)
    if more := path.stat().st_size - tokens.offset - tokens.nbytes:
        raise ValueError(
            f"path={str(path)!r} goes on for {more} bytes after the {tokens.shape} numbers that its header counts, which would "
            "be left out: save one array in a file, whole"
        )
    return tokens


def _mapped_numbers(path: Path, dtype: Any) -> Any:
    try:
        numbers: Any = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"dtype={dtype!r} is no numpy dtype ({error}); give one such as 'uint16'") from None
    _check_numbers(path, numbers.base, ("seq",))
    with path.open("rb") as file:
        if file.read(len(_NPY)) == _NPY:
            raise ValueError(f"path={str(path)!r} begins as an .npy file does, which is no number of its tokens; name it so")
    try:
        return np.memmap(path, dtype=numbers, mode="r")
    except _MALFORMED as error:
        raise ValueError(f"path={str(path)!r} cannot be read as {dtype}: {error}") from None


def _check_numbers(path: Path, dtype: Any, shape: tuple[Any, ...]) -> None:
    if not shape or dtype.kind not in "biufc" or dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise ValueError(f"path={str(path)!r} holds {dtype} of shape {shape}; numbers (seq, ...) are needed")
