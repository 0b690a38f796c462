"""Launches on CUDA devices, through CuPy, on torch's current stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dilkit.backends.cuda import compile as cuda_compile
from dilkit.backends.cuda.arguments import ARGUMENTS
from dilkit.backends.cuda.table import CudaKernel
from dilkit.backends.tiles.counters import Counters
from dilkit.device import capturing, current, current_stream

if TYPE_CHECKING:
    import torch


class CudaLauncher(Protocol):
    """Runs CUDA kernels on a device."""

    def resident(self, kernel: CudaKernel, device: torch.device) -> int:
        """Return the resident blocks of `kernel` on all of `device`, at least 1. May compile it."""

    def at_least_resident(self, kernel: CudaKernel, device: torch.device) -> int:
        """Return a lower bound of `resident` for a kernel of tall tiles, without compiling it."""

    def launch(self, kernel: CudaKernel, blocks: int, arguments: NDArray[np.void], device: torch.device) -> None:
        """Run `blocks` blocks after what was launched before. `arguments` are `ARGUMENTS`. Does not wait."""

    def counter(self, device: torch.device) -> int:
        """Return the address of two int32 zeros on `device`, shared by launches that follow each other there."""


_BYTES = np.dtype((np.void, ARGUMENTS.itemsize))
"""`ARGUMENTS` without their names: CuPy describes all fields of an array passed by value, for a tenth of a millisecond."""


class _Loaded(NamedTuple):
    function: Any
    resident: int


class Stream(NamedTuple):
    """A stream of torch's for CuPy's launches, whose own class would destroy the stream in the end."""

    ptr: int


class CupyLauncher:
    """Compiles a kernel at its first launch on a device, and keeps it loaded. Nothing is allocated, nothing waited for."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[CudaKernel, int], _Loaded] = {}
        self._multiprocessors: dict[torch.device, Multiprocessors] = {}
        self._counters = Counters()

    def resident(self, kernel: CudaKernel, device: torch.device) -> int:
        return self._load(kernel, device).resident

    def at_least_resident(self, kernel: CudaKernel, device: torch.device) -> int:
        if device not in self._multiprocessors:
            self._multiprocessors[device] = multiprocessors(device)
        return blocks_at_once(kernel, self._multiprocessors[device])

    def launch(self, kernel: CudaKernel, blocks: int, arguments: NDArray[np.void], device: torch.device) -> None:
        function = self._load(kernel, device).function
        stream = Stream(current_stream(device))
        by_value = arguments.view(_BYTES)
        with current(device):
            function((blocks,), (kernel.threads,), (by_value,), shared_mem=kernel.shared_bytes, stream=stream)

    def counter(self, device: torch.device) -> int:
        with current(device):
            return self._counters.address(device, current_stream(device), capturing(device))

    def _load(self, kernel: CudaKernel, device: torch.device) -> _Loaded:
        key = kernel, device.index
        loaded = self._loaded.get(key)
        if loaded is None:
            if capturing(device):
                raise RuntimeError(
                    f"kernel {kernel.name} is not loaded on {device}, and cannot be while a CUDA graph is captured: make the "
                    "same call once before"
                )
            loaded = self._loaded.setdefault(key, _load(kernel, device))
        return loaded


def _load(kernel: CudaKernel, device: torch.device) -> _Loaded:
    """Raises RuntimeError for a kernel of which not one block fits on a multiprocessor."""
    import cupy
    import torch
    from cupy.cuda import driver

    properties = torch.cuda.get_device_properties(device)
    code = cuda_compile.code_of(kernel, (properties.major, properties.minor))
    with torch.cuda.device(device):  # CuPy's guard would make a context on the device that was current before, too
        module = cupy.cuda.Module()
        module.load(code)
        function = module.get_function(kernel.name)
        # Blocks share what a multiprocessor has: all of it, or fewer run at once than registers allow.
        driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
        if kernel.shared_bytes:
            limit = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.funcSetAttribute(function.ptr, limit, kernel.shared_bytes)
        blocks = driver.occupancyMaxActiveBlocksPerMultiprocessor(function.ptr, kernel.threads, kernel.shared_bytes)
    if blocks < 1:
        raise RuntimeError(f"kernel {kernel} does not fit on {properties.name}; use another backend")
    return _Loaded(function, blocks * properties.multi_processor_count)


@dataclass(frozen=True)
class Multiprocessors:
    """Number of a device's multiprocessors; threads and bytes of shared memory of each."""

    count: int
    threads: int
    shared_bytes: int


def multiprocessors(device: torch.device) -> Multiprocessors:
    """Return the multiprocessors of `device`, in microseconds."""
    import torch
    from cupy.cuda import runtime

    properties = torch.cuda.get_device_properties(device)
    # CUDA is asked, for torch tells of shared memory from 2.7 on only. This makes no context on the device.
    shared_bytes = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerMultiprocessor, device.index)
    return Multiprocessors(properties.multi_processor_count, properties.max_threads_per_multi_processor, shared_bytes)


def blocks_at_once(kernel: CudaKernel, device: Multiprocessors) -> int:
    """Return a lower bound, at least 1, of the resident blocks of a kernel of tall tiles, without compiling it.

        blocks of a multiprocessor = min(BLOCKS, its threads / THREADS, its shared memory / dynamic bytes)

    The compiler limits registers for BLOCKS. Static shared memory limits no kernel of tall tiles, as tests check.
    """
    by_shared = device.shared_bytes // kernel.shared_bytes if kernel.shared_bytes else kernel.blocks
    return max(1, min(kernel.blocks, device.threads // kernel.threads, by_shared)) * device.count
