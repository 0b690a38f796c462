"""How dilkit measures: time, peak memory and the matmul rate that speeds are compared with. The method lives here alone."""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

MIB = 2**20
MATMUL_SIZE = {"cpu": 2048, "cuda": 4096}
_MATMUL_BUDGET = 2.0
"""Seconds one matmul may take before a smaller one is measured instead."""
_SELF_CHECK_BYTES = 32 * MIB
_FLUSH_BYTES = 256 * MIB


class MeasureError(RuntimeError):
    """A quantity that cannot be measured on this machine. The text says why."""


@dataclass(frozen=True)
class Samples:
    """Every sample of one function, in seconds a call, in the order taken; a sample is the mean over `calls` calls."""

    seconds: tuple[float, ...]
    calls: int = 1

    @property
    def median(self) -> float:
        """Seconds a call."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and third quartile in seconds a call, both the median where there is one sample."""
        if len(self.seconds) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def to_dict(self) -> dict[str, Any]:
        """All samples and what is read from them, as plain data."""
        low, high = self.quartiles
        return dict(median_s=self.median, q1_s=low, q3_s=high, calls_per_sample=self.calls, samples_s=list(self.seconds))


def time_interleaved(
    functions: dict[str, Callable[[], Any]],
    repeats: int = 7,
    warmup: int = 1,
    min_time: float = 0.0,
    device: str = "cpu",
    progress: Callable[[], Any] | None = None,
    cold: bool = False,
    before: Callable[[], Any] | None = None,
) -> dict[str, Samples]:
    """Time `functions` in rounds A B A B ..., so that whatever disturbs the machine disturbs all of them alike.

    Each is called `warmup` times untimed, then gives one sample a round for `repeats` rounds. A sample lasts at least about
    `min_time` seconds: short functions are called several times in it. Time is `perf_counter`, and CUDA events when `device`
    is "cuda". `progress` is called after every sample. Threads are as `torch.get_num_threads()` says; results are dropped.
    With `cold` ("cuda" only) each call finds the device's caches filled with something else, and time is that of calls alone.
    `before` is called, untimed, before every sample: with it a sample is one call, so that `min_time` must be 0.
    """
    if cold and device != "cuda":
        raise ValueError(f'cold={cold} with device={device!r}: caches are flushed on "cuda" only')
    if repeats < 1 or warmup < 0 or min_time < 0:
        raise ValueError(f"repeats={repeats}, warmup={warmup}, min_time={min_time}: at least 1, 0 and 0 are needed")
    if before is not None and min_time > 0:
        raise ValueError(f"min_time={min_time} with before={before}: a sample is one call then; leave min_time out")
    clock = _cold_cuda_seconds if cold else _cuda_seconds if device == "cuda" else _cpu_seconds
    calls = {}
    for name, function in functions.items():
        for _ in range(warmup):
            function()
        calls[name] = _calls_lasting(function, min_time, clock)
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            if before is not None:
                before()
            taken[name].append(clock(function, calls[name]) / calls[name])
            if progress is not None:
                progress()
    return {name: Samples(tuple(seconds), calls[name]) for name, seconds in taken.items()}


def _calls_lasting(function: Callable[[], Any], min_time: float, clock: Callable[[Callable[[], Any], int], float]) -> int:
    """How many calls of `function` last `min_time` seconds; 1, without calling it, where there is no such wish."""
    calls = 1
    while min_time > 0 and (taken := clock(function, calls)) < min_time:
        calls = max(calls + 1, min(10 * calls, round(1.2 * calls * min_time / max(taken, 1e-9))))
    return calls


def _cpu_seconds(function: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return time.perf_counter() - start


def _cuda_seconds(function: Callable[[], Any], calls: int) -> float:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _cold_cuda_seconds(function: Callable[[], Any], calls: int) -> float:
    """As `_cuda_seconds`, of each call by itself after a buffer larger than any L2 cache was overwritten."""
    import torch

    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    seconds = 0.0
    for _ in range(calls):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        flush.zero_()
        start.record()
        function()
        end.record()
        end.synchronize()
        seconds += float(start.elapsed_time(end)) / 1000
    return seconds


def peak_memory(function: Callable[[], Any], device: str = "cpu") -> int:
    """Peak extra memory of one call in bytes: the most held during it, its result included, over what was held before.

    On CUDA the allocator's statistics. On the CPU the kernel's high-water mark of the process's resident memory, which counts
    every allocation of every thread and library, but in pages: memory is counted when first written to. Good to about
    0.5 MiB. Warm `function` up first, or what it caches counts as well. Only Linux with glibc's allocator can do this:
    elsewhere, and where a known allocation is not seen in full, `MeasureError` is raised.
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


class PeakMeter:
    """The most that this process holds from now on, beyond what it holds now; as `peak_memory`, for what is no single call."""

    def __init__(self) -> None:
        _check_resident_method()
        self._before = _start_anew()

    def peak(self) -> int:
        """Bytes, so far."""
        return max(0, _status_bytes("VmHWM") - self._before)


def _resident_peak(function: Callable[[], Any]) -> int:
    before = _start_anew()
    result = function()
    peak = _status_bytes("VmHWM")
    del result
    return max(0, peak - before)


def _start_anew() -> int:
    """Bytes resident now, to which the high-water mark is set back.

    Freed memory that the allocator keeps would be reused unseen, so it is given back to the system first.
    """
    gc.collect()
    give_memory_back()
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def give_memory_back() -> None:
    """Give freed memory that the allocator keeps back to the system, where that can be done: with glibc."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise MeasureError(f"peak memory: /proc/self/status has no {field}")


@lru_cache(maxsize=1)
def _check_resident_method() -> None:
    """Raise `MeasureError` unless a known allocation is seen, the second time too: an allocator that keeps memory fails there."""
    import torch

    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"):
        raise MeasureError("peak memory of CPU code is measured on Linux with glibc only")
    try:
        for _ in range(2):
            seen = _resident_peak(lambda: torch.ones(_SELF_CHECK_BYTES, dtype=torch.uint8))
    except OSError as error:
        raise MeasureError(f"peak memory: {error}; the system does not let a process reset its high-water mark") from error
    if abs(seen - _SELF_CHECK_BYTES) > 0.1 * _SELF_CHECK_BYTES:
        expected = _SELF_CHECK_BYTES // MIB
        raise MeasureError(
            f"peak memory: a known {expected} MiB was seen as {seen / MIB:.1f} MiB; is another allocator preloaded?"
        )


@dataclass(frozen=True)
class MatmulRate:
    """The rate of a square matmul: `2 * size**3` FLOPs over the median of `samples`."""

    size: int
    dtype: str
    samples: Samples

    @property
    def gflops(self) -> float:
        """GFLOP/s."""
        return 2e-9 * self.size**3 / self.samples.median

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return dict(size=self.size, dtype=self.dtype, gflops=self.gflops, **self.samples.to_dict())


def matmul_rate(dtype: str = "float32", device: str = "cpu", repeats: int = 5) -> MatmulRate:
    """What torch's matmul of `dtype` reaches here and now, with `torch.get_num_threads()` threads: the yardstick of speeds."""
    size, multiply = square_matmul(dtype, device)
    samples = time_interleaved({"matmul": multiply}, repeats=repeats, warmup=2, device=device)
    return MatmulRate(size, dtype, samples["matmul"])


def square_matmul(dtype: str = "float32", device: str = "cpu", size: int | None = None) -> tuple[int, Callable[[], Any]]:
    """`(size, multiply)`: a matmul to time beside others, of random matrices of `size`, by default 2048 on a CPU, 4096 on a GPU.

    The size is halved until one product takes less than two seconds: half precision has no fast matmul on many CPUs.
    """
    import torch

    size = size or MATMUL_SIZE.get(device, MATMUL_SIZE["cpu"])
    clock = _cuda_seconds if device == "cuda" else _cpu_seconds
    probe = torch.ones(size // 8, size // 8, dtype=getattr(torch, dtype), device=device)
    expected = clock(lambda: probe @ probe, 2) / 2 * 8**3
    while expected > _MATMUL_BUDGET and size > 256:
        size, expected = size // 2, expected / 8
    left = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    return size, lambda: left @ left
