"""How dilkit measures time: functions in interleaved rounds, so that whatever disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dilkit.testing import memory
from dilkit.testing.accuracy import Check
from dilkit.tools.results.record import Samples

if TYPE_CHECKING:
    from torch import Tensor

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
) -> dict[str, Samples]:
    """Time `functions` in rounds A B A B ...

    Each is called `warmup` times untimed, then gives one sample a round for `repeats` rounds. A sample lasts at least about
    `min_time` seconds: short functions are called several times in it. Time is by `clock`, else by `perf_counter`, and by CUDA
    events when `device` is "cuda". Threads are as `torch.get_num_threads()` says; results are dropped. `before` is called,
    untimed, before every sample: with it a sample has to be one call, without a `min_time`.

    >>> samples = time_interleaved({"sum": lambda: sum(range(1000)), "max": lambda: max(range(1000))}, repeats=3)
    >>> {name: len(found.samples_s) for name, found in samples.items()}
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


def cold_cuda_seconds(function: Call, calls: int) -> float:
    """A clock: of each call by itself, after a buffer larger than any L2 cache was overwritten."""
    import torch

    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    return sum(_cuda_seconds(function, 1, flush.zero_) for _ in range(calls))


AGREEMENT = 1e-4
"""Largest difference that two ways of computing may have in fp32, in units of the largest value."""
AGREEMENT_BF16 = 5e-2
"""The same of many layers under autocast to bfloat16, which has eight bits."""


@dataclass(frozen=True)
class SingleCall:
    """One call: its result, its seconds, and the bytes that it held beyond what was held before, None where `why` not."""

    result: Any
    seconds: float
    peak_bytes: int | None
    why: str | None = None


def call_once(call: Callable[[], Any]) -> SingleCall:
    """Call it, once."""
    calls: list[tuple[Any, float]] = []

    def timed() -> None:
        start = perf_counter()
        calls.append((call(), perf_counter() - start))

    try:
        peak: int | None = memory.peak_memory(timed)
        why = None
    except memory.MeasureError as error:
        peak, why = None, str(error)
        timed()
    return SingleCall(*calls[0], peak, why)


def agreement(what: str, found: Tensor, other: Tensor, seq: int, within: float = AGREEMENT) -> Check:
    """Whether two results of `seq` tokens, computed in one of two ways, are one: by default of those computed in fp32."""
    error, largest = (x.abs().max().item() for x in (found.double() - other.double(), other))
    return Check.of(what, seq, error, 0.0, within * largest)
