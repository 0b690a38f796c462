"""Time of functions, measured in interleaved rounds: whatever disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from dilkit.tools.results.rows import Row

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
    clock: Clock | None = None,
    before: Call | None = None,
) -> dict[str, Row]:
    """Time `functions` in rounds A B A B ...

    Each is called `warmup` times untimed, then gives one sample a round for `repeats` rounds. A sample lasts at least about
    `min_time` seconds: short functions are called several times in it. Time is by `clock`, else by that of the `device`.
    `before` is called, untimed, before every sample: with it a sample has to be one call, without a `min_time`.

    >>> samples = time_interleaved({"sum": lambda: sum(range(1000)), "max": lambda: max(range(1000))}, repeats=3)
    >>> {name: len(times.samples) for name, times in samples.items()}
    {'sum': 3, 'max': 3}
    """
    clock = clock or clock_of(device)
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
    return {name: Row(samples=tuple(samples), calls=calls[name]) for name, samples in seconds.items()}


def clock_of(device: str) -> Clock:
    """Return the clock of a kind of device: CUDA events, else `perf_counter`."""
    return _cuda_seconds if device == "cuda" else _cpu_seconds


def _calls_lasting(function: Call, min_time: float, clock: Clock) -> int:
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
    """Return seconds by CUDA events; what `start_late` enqueues comes before the first of them."""
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


def cold_cuda_seconds(function: Call, calls: int) -> float:
    """Return seconds of calls that are timed one by one, each after a buffer larger than any L2 cache was overwritten."""
    import torch

    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    return sum(_cuda_seconds(function, 1, flush.zero_) for _ in range(calls))
