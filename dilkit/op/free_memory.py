"""Give freed memory back to the system: larger tensors may not fit into the gaps that the allocator keeps."""

from __future__ import annotations

import ctypes
import sys


def give_memory_back() -> None:
    """Give freed memory that the allocator keeps back to the system, where that can be done: with glibc."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
