"""How many blocks of a kernel run at once on a device, worked out from the table: nothing is compiled for it.

    blocks of a multiprocessor = min(BLOCKS, threads it holds / THREADS, shared memory it has / dynamic bytes)

BLOCKS is what the compiler limits registers for. Code that needs fewer of them runs more blocks, which the driver knows once the
code is loaded. Shared memory that a source declares is not in the table: it limits no kernel of tall tiles, and tests hold that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dilkit.backends.cuda.table import CudaKernel

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Multiprocessors:
    """What a device has of them, and what each holds: threads, and bytes of shared memory."""

    count: int
    threads: int
    shared_bytes: int


def multiprocessors(device: torch.device) -> Multiprocessors:
    """Those of `device`. To ask takes microseconds."""
    import torch
    from cupy.cuda import runtime

    properties = torch.cuda.get_device_properties(device)
    # CUDA is asked, for torch tells of shared memory from 2.7 on only. This makes no context on the device.
    shared_bytes = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerMultiprocessor, device.index)
    return Multiprocessors(properties.multi_processor_count, properties.max_threads_per_multi_processor, shared_bytes)


def blocks_at_once(kernel: CudaKernel, device: Multiprocessors) -> int:
    """How many blocks of `kernel`, of tall tiles, run at once on all of `device`, at least; 1 or more."""
    by_shared = device.shared_bytes // kernel.shared_bytes if kernel.shared_bytes else kernel.blocks
    return max(1, min(kernel.blocks, device.threads // kernel.threads, by_shared)) * device.count
