"""Freed memory that the allocator keeps, given back to the system: what is made next may not fit into its gaps."""

from __future__ import annotations

import ctypes
import sys


def give_memory_back() -> None:
    """Give freed memory that the allocator keeps back to the system, where that can be done: with glibc."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
