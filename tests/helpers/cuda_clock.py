"""A substitute for `torch.cuda`, which logs events, flushes, captures and replays. Its device computes on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dilkit.tools.measure import timing


class FakeCuda:
    """Launches are logged, and recorded while a graph is captured.

    `log`: what the device does, in order. `behind`: flushes after which it is ahead of the processor. `broken`: a capture cannot
    be ended.
    """

    def __init__(self, monkeypatch):
        self.log: list[str] = []
        self.behind, self.broken = 0, False
        self.graph: Graph | None = None
        self.streams = [Stream(self, "default")]
        for name, fake in {
            "Event": lambda enable_timing: Event(self),
            "Stream": lambda: Stream(self, "side"),
            "CUDAGraph": lambda: Graph(self),
            "graph": self.capture,
            "stream": self.on_stream,
            "current_stream": lambda: self.streams[-1],
            "synchronize": lambda: self.log.append("synchronize"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(timing, "_ABANDONED", [])
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *size, device="cpu", **how: self if device == "cuda" else empty(*size, **how))

    def zero_(self):
        self.launch("flush", lambda: None)

    def launch(self, name: str, kernel: Callable[[], object]):
        """Run a kernel; while a graph is captured, it is recorded and its memory is not written."""
        if self.graph is not None:
            self.graph.kernels.append(kernel)
        else:
            self.log.append(name)
            kernel()

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        former = [*self.streams]
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams = former

    @contextmanager
    def capture(self, graph: Graph, pool, stream: Stream) -> Iterator[None]:
        """Capture on `stream`, which stays the current one if the capture cannot be ended, as with `torch.cuda.graph`."""
        assert stream is self.streams[-1], "the warm-up was on another stream"
        assert stream.name == "side", "the default stream cannot be captured"
        assert pool is None or pool.stream is stream, "a pool gives the memory of one stream to another"
        self.log.append("capture")
        graph.shared, graph.stream, self.graph = pool, stream, graph
        self.streams.append(stream)
        yield
        self.graph = None
        if self.broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.streams.pop()


class Stream:
    def __init__(self, cuda: FakeCuda, name: str):
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: Stream):
        self.cuda.log.append(f"{self.name} waits for {other.name}")


class Event:
    """Record in the log; the time between two is that of the kernels and replays logged between them, a second each."""

    def __init__(self, cuda: FakeCuda):
        self.cuda, self.at = cuda, -1

    def record(self):
        self.at = len(self.cuda.log)
        self.cuda.log.append("event")

    def query(self) -> bool:
        since = self.cuda.log[: self.at][::-1]
        return since.index("synchronize") <= self.cuda.behind

    def synchronize(self):
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1000.0 * len([what for what in self.cuda.log[self.at + 1 : end.at] if what != "event"])


class Graph:
    def __init__(self, cuda: FakeCuda):
        self.cuda, self.kernels, self.shared, self.stream = cuda, list[Callable[[], object]](), None, cuda.streams[0]

    def pool(self) -> Graph:
        return self

    def replay(self):
        self.cuda.log.append("replay")
        for kernel in self.kernels:
            kernel()
