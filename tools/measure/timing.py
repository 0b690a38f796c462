"""Time of functions, measured in interleaved rounds: whatever disturbs the machine disturbs all of them alike.

CUDA has two times. GPU time is that of replays of a CUDA graph (`captured`), each behind a flush of the L2 cache
(`cold_cuda_seconds`). Time with launches is that of calls in a row without a pause, the clock of the device "cuda".
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dilkit.tools.results.rows import ResultRow

Call = Callable[[], Any]
Clock = Callable[[Call, int], float]
"""`clock(function, calls)`: the seconds that so many calls take together."""
_FLUSH_BYTES = 256 << 20
"""Bytes that a flush overwrites: more than any L2 cache has."""
_MOST_FLUSHES = 32
_ABANDONED: list[Any] = []
"""Graphs whose capture could not be ended. torch's allocator goes on asking them, so they are never freed."""


def time_interleaved(
    functions: Mapping[str, Call],
    repeats: int = 7,
    warmup: int = 1,
    min_time: float = 0.0,
    device: str = "cpu",
    clock: Clock | None = None,
    before: Call | None = None,
) -> dict[str, ResultRow]:
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
    return {name: ResultRow(samples=tuple(samples), calls=calls[name]) for name, samples in seconds.items()}


def clock_of(device: str) -> Clock:
    """Return the clock of a kind of device: CUDA events, else `perf_counter`."""
    return (lambda function, calls: _by_events(function, calls)[0]) if device == "cuda" else _cpu_seconds


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


def _by_events(function: Call, calls: int, before: Call = lambda: None) -> tuple[float, bool]:
    """Return seconds, and True if the device was done with what `before` launched before all calls were launched."""
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    before()
    start.record()
    for _ in range(calls):
        function()
    end.record()
    late = start.query()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000, late


def cold_cuda_seconds(function: Call, calls: int) -> float:
    """Return seconds of calls that are timed one by one, each behind a flush of the L2 cache, which is not timed.

    A call that is no replay, and whose launches outlast `_MOST_FLUSHES` flushes, is timed with launches.
    """
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    # The processor must have launched a whole replay before the device has flushed (in 60 us on an H200, at 4.2 TB/s): else the
    # device waits in the timed region. If it was done first, the sample is taken again behind twice as many flushes.
    def seconds(flushes: int) -> float:
        taken, late = _by_events(function, 1, lambda: [flush.zero_() for _ in range(flushes)])
        return seconds(2 * flushes) if late and flushes < _MOST_FLUSHES else taken

    return sum(seconds(1) for _ in range(calls))


def captured(function: Call, pool: Any = None, stream: Any = None) -> Any:
    """Return a `torch.cuda.CUDAGraph` of one call, captured after calls that warm up, and replayed once.

    Autograd runs a backward pass on the stream of its forward pass, which a call therefore makes in its first call, here; whoever
    replays the graph keeps `function`. `pool` is that of another graph of this `stream`. Raises RuntimeError, or what the call
    raises, for what cannot be captured, and if a replay does not compute what the call does.
    """
    cuda: Any = torch.cuda
    graph, stream, failure = cuda.CUDAGraph(), stream or cuda.Stream(), None
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):  # which becomes the former one again where a capture fails, too
        function()
        wanted = [x.clone() for x in _results(function())]
        _ABANDONED.append(graph)
        with cuda.graph(graph, pool=pool, stream=stream):
            try:
                results = _results(function())
            except Exception as error:
                failure = error
        _ABANDONED.pop()
    if failure is not None:
        try:
            raise failure
        finally:
            del failure, wanted  # which the failure's traceback would keep
    cuda.current_stream().wait_stream(stream)
    for x in results:
        x.fill_(float("nan"))
    graph.replay()
    for x, exact in zip(results, wanted, strict=True):
        allowed = max(4 * torch.finfo(x.dtype).eps, 1e-4) * exact.abs().max()
        if not (x - exact).abs().max() <= allowed:
            raise RuntimeError("a replay of the CUDA graph does not compute what the call does")
    return graph


def _results(result: Any) -> list[Any]:
    results = result if isinstance(result, (tuple, list)) else [result]
    return [x.detach() for x in results if torch.is_tensor(x) and x.is_floating_point() and x.numel()]
