"""Staging: bytes of a GPU travel through host memory where a transport cannot read the memory of the GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dilkit.comm.transports.base import PeerBytes


def staged(
    post: Callable[[PeerBytes, PeerBytes], Callable[[], None]], send: PeerBytes, recv: PeerBytes, device: torch.device
) -> Callable[[], None]:
    """Do `post(send, recv)`, which returns what waits for the end, with copies in host memory."""
    buffers = [(peer, _host_memory(part)) for peer, part in recv]
    wait = post(host_copies(send, device), buffers)

    def finish() -> None:
        wait()
        for (_, host), (_, part) in zip(buffers, recv, strict=True):
            part.copy_(host, non_blocking=True)  # in the order of the current stream of the device

    return finish


def host_copies(parts: PeerBytes, device: torch.device) -> PeerBytes:
    """Copies of `parts` in host memory, complete when this returns."""
    copies = [(peer, _host_memory(part).copy_(part, non_blocking=True)) for peer, part in parts]
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return copies


def _host_memory(part: Tensor) -> Tensor:
    """Pinned for CUDA, so that copies run at the bus's speed. The allocator keeps it until copies from it are done."""
    return torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=part.device.type == "cuda")
