"""Bytes of a GPU on their way through the memory of its host, for transports that cannot read the GPU's."""

from __future__ import annotations

import torch
from torch import Tensor

from dilkit.comm.transports.base import Parts


def outgoing(parts: Parts, device: torch.device) -> Parts:
    """Copies of `parts` in host memory, complete when this returns."""
    copies = [(peer, _host_memory(part).copy_(part, non_blocking=True)) for peer, part in parts]
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return copies


def incoming(parts: Parts) -> Parts:
    """Host memory into which what is meant for `parts` can be received."""
    return [(peer, _host_memory(part)) for peer, part in parts]


def deliver(staged: Parts, parts: Parts) -> None:
    """Copy what was received to where it belongs, in the order of the device's current stream."""
    for (_, host), (_, part) in zip(staged, parts, strict=True):
        part.copy_(host, non_blocking=True)


def _host_memory(part: Tensor) -> Tensor:
    """Pinned for CUDA, so that copies run at the bus's speed. The allocator keeps it until copies from it are done."""
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=part.device.type == "cuda")
