"""How dilkit measures time: functions in interleaved rounds, so that whatever disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from dilkit.tools.results.record import Samples

Call = Callable[[], Any]
Clock = Callable[[Call, int], float]
"""`clock(function, calls)`: the seconds that so many calls take together."""
_FLUSH_BYTES = 256 << 20


def time_interleaved(
    functions: Mapping[str, Call],
    repeats: int = 7,
    warmup: int = 1,
    min_time: float = 0.0,
    device: str = "cpu",
    progress: Call | None = None,
    cold: bool = False,
    before: Call | None = None,
) -> dict[str, Samples]:
    """Time `functions` in rounds A B A B ...

    Each is called `warmup` times untimed, then gives one sample a round for `repeats` rounds. A sample lasts at least about
    `min_time` seconds: short functions are called several times in it. Time is `perf_counter`, and CUDA events when `device`
    is "cuda". `progress` is called after every sample. Threads are as `torch.get_num_threads()` says; results are dropped.
    With `cold` ("cuda" only) each call finds the device's caches filled with something else, and time is that of calls alone.
    `before` is called, untimed, before every sample: with it a sample is one call, so that `min_time` must be 0.

    >>> samples = time_interleaved({"sum": lambda: sum(range(1000)), "max": lambda: max(range(1000))}, repeats=3)
    >>> {name: len(found.samples_s) for name, found in samples.items()}
    {'sum': 3, 'max': 3}
    """
    if cold and device != "cuda":
        raise ValueError(f'cold={cold} with device={device!r}: caches are flushed on "cuda" only')
    if repeats < 1 or warmup < 0 or min_time < 0:
        raise ValueError(f"repeats={repeats}, warmup={warmup}, min_time={min_time}: at least 1, 0 and 0 are needed")
    if before is not None and min_time > 0:
        raise ValueError(f"min_time={min_time} with before={before}: a sample is one call then; leave min_time out")
    clock = _cold_cuda_seconds if cold else clock_of(device)
    calls = {}
    for name, function in functions.items():
        for _ in range(warmup):
            function()
        calls[name] = _calls_lasting(function, min_time, clock)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            if before is not None:
                before()
            seconds[name].append(clock(function, calls[name]) / calls[name])
            if progress is not None:
                progress()
    return {name: Samples.of(samples, calls[name]) for name, samples in seconds.items()}


def clock_of(device: str) -> Clock:
    """The clock of a kind of device."""
    return _cuda_seconds if device == "cuda" else _cpu_seconds


def _calls_lasting(function: Call, min_time: float, clock: Clock) -> int:
    """How many calls of `function` last `min_time` seconds; 1, without calling it, where that is 0."""
    calls = 1
    while min_time > 0 and (seconds := clock(function, calls)) < min_time:
        calls = max(calls + 1, min(10 * calls, round(1.2 * calls * min_time / max(seconds, 1e-9))))
    return calls


def _cpu_seconds(function: Call, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return time.perf_counter() - start


def _cuda_seconds(function: Call, calls: int, start_late: Call = lambda: None) -> float:
    """By CUDA events; what `start_late` enqueues comes before the first of them."""
    import torch

    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    start_late()
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _cold_cuda_seconds(function: Call, calls: int) -> float:
    """Of each call by itself, after a buffer larger than any L2 cache was overwritten."""
    import torch

    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    return sum(_cuda_seconds(function, 1, flush.zero_) for _ in range(calls))
