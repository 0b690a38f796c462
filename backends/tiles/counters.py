"""Counters by which the blocks of a launch share its tiles, or the items of a step.

A counter is two int32: of tiles, and of those that are done, which a step of decoding counts. A kernel finds it at 0 and leaves
it at 0 (`take_number` of `cuda/kernels/dilated.cuh`, `attend_stored` of `triton/attend_stored.py`): nothing is launched to clear
it. It serves one launch at a time:

    launched    the kernels on a stream run one after the other: a counter for each stream of each device
    captured    a graph may run beside anything else, its kernels beside each other, each only after its own last run:
                a counter for each captured launch, for as long as the graph may run

A launch that fails runs no block. A kernel that is stopped on its way takes its context along, and the counters with it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from dilkit.backends.tiles import captured

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PAGE = 2**14
"""Counters that are allocated at once. At least half as many launches can be captured after any other launch."""

PER_THREAD = 2
"""The handle by which CUDA knows each thread's own default stream."""


class Counters:
    """The counters of all devices."""

    def __init__(self) -> None:
        self._pages: dict[int, _Page] = {}
        self._of_stream: dict[tuple[int, int, int], tuple[_Page, int]] = {}
        self._lock = threading.Lock()

    def address(self, device: torch.device, stream: int, capturing: bool) -> int:
        """Where a counter lies for a launch on the stream with handle `stream`, or, if `capturing`, into a graph.

        Raises RuntimeError if there is none left to capture with, which is so before any other launch on the device.
        """
        with self._lock:
            page = self._pages.get(device.index)
            if capturing:
                return _captured(page, device)
            if page is None or page.left < PAGE // 2:
                page = self._pages[device.index] = _Page(device)
            key = device.index, stream, threading.get_ident() if stream == PER_THREAD else 0
            if key not in self._of_stream:
                self._of_stream[key] = page, page.take()
            return self._of_stream[key][1]


class _Page:
    """Counters that are handed out one after the other, none twice."""

    def __init__(self, device: torch.device) -> None:
        import torch

        # Copied, which is waited for, not filled on some stream: any stream may use them at once.
        self.data: Tensor = torch.zeros(PAGE, dtype=torch.int64).to(device)
        self.left = PAGE

    def take(self) -> int:
        self.left -= 1
        return self.data.data_ptr() + self.left * self.data.element_size()


def _captured(page: _Page | None, device: torch.device) -> int:
    if page is None or not page.left:
        raise RuntimeError(
            f"no counter is left on {device} for a launch that is captured in a CUDA graph: make the same call once before"
        )
    captured.keep(page.data, device)
    return page.take()
