"""The cores of this process, and the threads of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def usable_cores() -> int:
    """Count the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def torch_threads(count: int) -> Iterator[int]:
    """Have torch compute with `count` threads within the block. Yields their number.

    >>> import torch
    >>> with torch_threads(1):
    ...     torch.get_num_threads()
    1
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield count
    finally:
        torch.set_num_threads(before)
