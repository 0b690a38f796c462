"""Files of tokens, mapped into memory: `.npy` files, and raw files of numbers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dilkit.files import check_regular


def mapped_tokens(path: str | Path, dtype: Any) -> Any:
    """The tokens in a file, `(seq, ...)`. Raises TypeError or ValueError for a path, a file or a dtype that does not fit."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path={path!r} is a {type(path).__name__}; a path is needed")
    check_regular(Path(path), Path(path).stat(), most=sys.maxsize)
    is_npy = Path(path).suffix == ".npy"
    if is_npy and dtype is not None:
        raise ValueError(f"dtype={dtype!r} is for raw files; path={str(path)!r} says itself what is in it")
    if not is_npy and dtype is None:
        raise ValueError(f"path={str(path)!r} is no .npy file; say what is in it, as dtype='uint16'")
    try:
        numbers: Any = None if is_npy else np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"dtype={dtype!r} is no numpy dtype ({error}); give one such as 'uint16'") from None
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False) if is_npy else np.memmap(path, dtype=numbers, mode="r")
    except (ValueError, TypeError, EOFError, SyntaxError, MemoryError, OverflowError) as error:
        raise ValueError(f"path={str(path)!r} cannot be read as {'.npy' if is_npy else dtype}: {error}") from None
    if tokens.ndim == 0 or tokens.dtype.kind not in "biufc" or tokens.dtype.itemsize > (16 if tokens.dtype.kind == "c" else 8):
        raise ValueError(f"path={str(path)!r} holds {tokens.dtype} of shape {tokens.shape}; numbers (seq, ...) are needed")
    return tokens
