"""Staging: bytes of a GPU travel through host memory where a transport cannot read the memory of the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from dilkit.comm.transports.base import PeerBytes


def host_copies(parts: PeerBytes, device: torch.device) -> PeerBytes:
    """Copies of `parts` in host memory, complete when this returns."""
    copies = [(peer, _host_memory(part).copy_(part, non_blocking=True)) for peer, part in parts]
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return copies


def host_buffers(parts: PeerBytes) -> PeerBytes:
    """Host memory to receive into what is meant for `parts`."""
    return [(peer, _host_memory(part)) for peer, part in parts]


def copy_back(staged: PeerBytes, parts: PeerBytes) -> None:
    """Copy what was received to the memory of the device, in the order of its current stream."""
    for (_, host), (_, part) in zip(staged, parts, strict=True):
        part.copy_(host, non_blocking=True)


def _host_memory(part: Tensor) -> Tensor:
    """Pinned for CUDA, so that copies run at the bus's speed. The allocator keeps it until copies from it are done."""
    return torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=part.device.type == "cuda")
