"""Launches of the backend in numba.cuda, redirected where it would launch on a GPU, with none at hand.

backend --> DeviceLauncher --> RedirectedKernel: compiled to PTX, arguments packed as numba packs them --> Launch --> machine
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from numba import cuda
from numba.cuda import dispatcher
from ptx.launches.launch import POINTER_BYTES, Argument, Launch, Machine, pointer

from dilkit.backends.numba import kernels
from dilkit.backends.numba.arguments import Tiling
from dilkit.backends.numba.backend import NumbaCuda
from dilkit.backends.numba.kernels import KERNELS, signature
from dilkit.device import Capability


class RedirectedKernel:
    """A compiled kernel whose launches go to a machine."""

    def __init__(self, machine: Machine, role: str, dtype: str, tiling: Tiling, capability: Capability) -> None:
        self.machine, self.types = machine, signature(role, dtype).args
        self.ptx, self.entry = compiled(role, dtype, tiling, capability)

    def __getitem__(self, configuration: tuple[Any, ...]) -> Callable[..., None]:
        blocks, (across, down), _ = configuration

        def launch(*arguments: Any) -> None:
            passed = tuple(packed(self.types, arguments))
            self.machine(Launch(self.ptx, self.entry, (blocks, 1, 1), (across, down, 1), 0, passed))

        return launch


@lru_cache(maxsize=256)
def compiled(role: str, dtype: str, tiling: Tiling, capability: Capability) -> tuple[str, str]:
    """The PTX of a kernel and the name of its entry."""
    ptx, _ = cuda.compile_ptx(KERNELS[role](tiling), signature(role, dtype), cc=capability, device=False)
    return ptx, ptx.split(".entry", 1)[1].split("(", 1)[0].strip()


class Address(int):
    """Where a tensor's memory begins, which is passed like any other whole number."""

    tensor: torch.Tensor


class Packer:
    """As much of a kernel as packing takes."""

    extensions = ()

    def _prepare_args(self, *args: Any) -> None:
        dispatcher._Kernel._prepare_args(self, *args)


class Addressed:
    """A tensor as numba sees one on a device, whose address says of which tensor it is."""

    def __init__(self, x: torch.Tensor) -> None:
        self.size, self.shape, self.ptr = x.numel(), tuple(x.shape), Address(x.data_ptr())
        self.ptr.tensor = x
        self.dtype = SimpleNamespace(itemsize=x.element_size())
        self._layout = SimpleNamespace(strides_in_bytes=tuple(stride * x.element_size() for stride in x.stride()))

    def to_device(self, retr: list[Any], stream: Any) -> Addressed:
        return self


def packed(types: tuple[Any, ...], arguments: tuple[Any, ...]) -> Iterator[Argument]:
    """The arguments as numba passes them to the driver: of an array its address among its sizes and strides."""
    passed: list[Any] = []
    with mock.patch.object(dispatcher, "wrap_arg", Addressed):
        for of_type, value in zip(types, arguments, strict=True):
            dispatcher._Kernel._prepare_args(Packer(), of_type, value, 0, [], passed)
    for value in passed:
        if isinstance(value, Address):
            yield pointer(value.tensor)
        elif isinstance(value, int):
            yield Argument(value.to_bytes(POINTER_BYTES, "little", signed=True))
        else:
            yield Argument(bytes(value))


@contextmanager
def redirected(capability: Capability, machine: Machine) -> Iterator[NumbaCuda]:
    """The backend for tensors of the CPU, whose launches for a GPU of this `capability` go to `machine`."""
    stands_in = mock.patch.object
    with (
        stands_in(kernels, "compiled", partial(RedirectedKernel, machine)),
        stands_in(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=capability)),
        stands_in(cuda, "gpus", defaultdict(nullcontext)),
        stands_in(cuda, "external_stream", lambda address: address),
        stands_in(cuda, "as_cuda_array", lambda x, sync: x),
        stands_in(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0)),
        stands_in(torch.cuda, "get_device_capability", lambda device: capability),
    ):
        yield NumbaCuda()
