"""The peak memory of a call: the device's allocator statistics, or on the CPU the high-water mark of the process."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from dilkit.op.free_memory import give_memory_back

MIB = 2**20
_SELF_CHECK_BYTES = 32 * MIB
_SELF_CHECK_TRIES = 5


class MeasureError(RuntimeError):
    """A quantity that cannot be measured on this machine. The text says why."""


def peak_memory(function: Callable[[], Any], device: str = "cpu") -> int:
    """Measure the peak extra memory of one call in bytes: the most held during it, with its result, over what was held before.

    On CUDA by the allocator's statistics; on the CPU by the high-water mark of the process's resident memory, without pages of
    files, to about 0.5 MiB. Warm `function` up first, or its caches count as well. Raises `MeasureError` anywhere but on Linux
    with glibc's allocator, and where a known allocation is not seen in full.
    """
    check_peak_memory(device)
    return _cuda_peak(function) if device == "cuda" else _resident_peak(function)


def check_peak_memory(device: str = "cpu") -> None:
    """Raise `MeasureError` where `peak_memory` would: before what is measured has been started."""
    if device != "cuda":
        _check_resident_method()


def _cuda_peak(function: Callable[[], Any]) -> int:
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del result
    return max(0, peak - before)


def _resident_peak(function: Callable[[], Any]) -> int:
    """Measure the resident peak, less pages read from files: code that was taken out of memory comes back when called."""
    gc.collect()
    give_memory_back()  # freed memory that the allocator keeps would be reused unseen
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back
    before, mapped = _status_bytes("VmRSS"), _status_bytes("RssFile")
    result = function()
    peak, read = _status_bytes("VmHWM"), max(0, _status_bytes("RssFile") - mapped)
    del result
    return max(0, peak - before - read)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise MeasureError(f"peak memory: /proc/self/status has no {field}")


@lru_cache(maxsize=1)
def _check_resident_method() -> None:
    """Raise `MeasureError` unless a known allocation is seen in full, in one of a few tries after the first."""
    import torch

    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"):
        raise MeasureError("peak memory of CPU code is measured on Linux with glibc only")
    seen = []
    try:
        for _ in range(_SELF_CHECK_TRIES):
            seen.append(_resident_peak(lambda: torch.ones(_SELF_CHECK_BYTES, dtype=torch.uint8)))
            if len(seen) > 1 and abs(seen[-1] - _SELF_CHECK_BYTES) <= 0.1 * _SELF_CHECK_BYTES:
                return
    except OSError as error:
        raise MeasureError(f"peak memory: {error}; the system does not let a process reset its high-water mark") from error
    expected, sizes = _SELF_CHECK_BYTES // MIB, ", ".join(f"{size / MIB:.1f}" for size in seen[1:])
    raise MeasureError(f"peak memory: a known {expected} MiB was seen as {sizes} MiB; is another allocator preloaded?")
