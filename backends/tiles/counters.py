"""Counters by which the blocks of a launch share its tiles, or the items of a step.

A counter is two int32: of tiles, and of those that are done, which a step of decoding counts. A kernel finds it at 0 and leaves
it at 0 (`take_number` of `cuda/kernels/dilated.cuh`, `attend_stored` of `triton/attend_stored.py`). It serves one launch at once:

    launched    the kernels on a stream run one after the other: a counter for each stream of each device. Streams are told apart
                by the number that CUDA gives no other stream: a new one may have the handle of one whose kernels still run
    captured    a graph may run beside anything else: a counter for each role that is captured, whose launches follow each other,
                for as long as the graph may run

No counter is handed out twice, and those of streams stay for good. A kernel that is stopped on its way takes its context along.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from dilkit.backends.tiles.kept import keep
from dilkit.device import cuda_stream_number

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PAGE = 2**14
"""Counters that are allocated at once. At least half as many roles can be captured after any other launch."""

DEFAULT = 0
"""The handle of the stream of a device that is there for as long as the device is."""

MOST_STREAMS = 2**12
"""Most streams whose counters are remembered. Before there are more all are forgotten, and take another."""


class Counters:
    def __init__(self) -> None:
        self._pages: dict[int, _Page] = {}
        self._of_stream: dict[tuple[int, int | None], int] = {}
        self._of_streams: list[_Page] = []
        self._lock = threading.Lock()

    def address(self, device: torch.device, stream: int, capturing: bool) -> int:
        """Return the address of a counter for launches on the stream with handle `stream`, or, if `capturing`, in a graph.

        `device` is the current one: it is asked what the handles mean that each device has, or each thread.
        Raises RuntimeError if there is none left to capture with, which is so before any other launch on the device.
        """
        with self._lock:
            page = self._pages.get(device.index)
            if capturing and (page is None or not page.left):
                raise RuntimeError(
                    f"no counter is left on {device} for a launch that is captured in a CUDA graph: make the same call once "
                    "before"
                )
            if capturing and page is not None:
                keep(page.data, device)
                return page.take()
            if page is None or page.left < PAGE // 2:
                page = self._pages[device.index] = _Page(device)
            key = device.index, None if stream == DEFAULT else cuda_stream_number(stream)
            if key not in self._of_stream:
                if len(self._of_stream) == MOST_STREAMS:
                    self._of_stream.clear()
                if page not in self._of_streams:
                    self._of_streams.append(page)
                self._of_stream[key] = page.take()
            return self._of_stream[key]


class _Page:
    def __init__(self, device: torch.device) -> None:
        import torch

        # Copied, which is waited for, not filled on some stream: any stream may use them at once.
        self.data: Tensor = torch.zeros(PAGE, dtype=torch.int64, device="cpu").to(device)
        self.left = PAGE

    def take(self) -> int:
        self.left -= 1
        return self.data.data_ptr() + self.left * self.data.element_size()
