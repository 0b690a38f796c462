"""The backend in numba.cuda, whose launches go to the emulator, with no GPU at hand.

backend --> NumbaLauncher --> RedirectedKernel: compiled to PTX, arguments packed as numba packs them --> emulator
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from numba import cuda
from numba.cuda import dispatcher
from ptx.emulator import Emulator
from ptx.launches.over_tensors import launch

from dilkit.backends.numba import backend
from dilkit.backends.numba.arguments import Tiling, signature
from dilkit.backends.numba.backend import NumbaCuda, kernels
from dilkit.device import Capability
from dilkit.problem import Problem


class NumbaOnPTX(NumbaCuda):
    requires = ("torch",)
    limits = replace(NumbaCuda.limits, devices=frozenset({"cpu"}), min_capability=None)
    priority = -100

    def proof_facts(self, problem: Problem) -> tuple[str, ...]:
        return ()


@contextmanager
def opened(capability: Capability, emulator: Emulator) -> Iterator[NumbaCuda]:
    stands_in = mock.patch.object
    with (
        stands_in(backend, "compiled", partial(RedirectedKernel, emulator)),
        stands_in(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=capability)),
        stands_in(cuda, "gpus", defaultdict(nullcontext)),
        stands_in(cuda, "external_stream", lambda address: address),
        stands_in(cuda, "as_cuda_array", lambda x, sync: x),
        stands_in(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0)),
        stands_in(torch.cuda, "get_device_capability", lambda device: capability),
    ):
        on_ptx = NumbaOnPTX()
        on_ptx.name = "numba's PTX on sm_{}{}".format(*capability)  # type: ignore[misc]
        yield on_ptx


class RedirectedKernel:
    """A compiled kernel whose launches go to an emulator."""

    def __init__(self, emulator: Emulator, role: str, dtype: str, tiling: Tiling, capability: Capability) -> None:
        self.emulator, self.types = emulator, signature(role, dtype).args
        self.ptx = compiled(role, dtype, tiling, capability)

    def __getitem__(self, configuration: tuple[Any, ...]) -> Callable[..., None]:
        blocks, threads, _ = configuration

        def launch_packed(*arguments):
            launch(self.emulator, self.ptx, [*packed(self.types, arguments)], blocks=blocks, threads=threads)

        return launch_packed


@lru_cache(maxsize=256)
def compiled(role: str, dtype: str, tiling: Tiling, capability: Capability) -> str:
    ptx, _ = cuda.compile_ptx(kernels()[role](tiling), signature(role, dtype), cc=capability, device=False)
    return str(ptx)


class Address(int):
    """Address of a tensor's memory, which is passed like any other whole number."""

    tensor: torch.Tensor


class Packer:
    """The part of a kernel that packing uses."""

    extensions = ()

    def _prepare_args(self, *args: Any) -> None:
        dispatcher._Kernel._prepare_args(self, *args)


class Addressed:
    """A tensor as numba sees one on a device, whose address leads back to the tensor."""

    def __init__(self, x: torch.Tensor) -> None:
        self.size, self.shape, self.ptr = x.numel(), tuple(x.shape), Address(x.data_ptr())
        self.ptr.tensor = x
        self.dtype = SimpleNamespace(itemsize=x.element_size())
        self._layout = SimpleNamespace(strides_in_bytes=tuple(stride * x.element_size() for stride in x.stride()))

    def to_device(self, retr: list[Any], stream: Any) -> Addressed:
        return self


def packed(types: tuple[Any, ...], arguments: tuple[Any, ...]) -> Iterator[bytes | torch.Tensor]:
    """Yield the arguments as numba passes them to the driver: an array as its address among its sizes and strides."""
    passed: list[Any] = []
    with mock.patch.object(dispatcher, "wrap_arg", Addressed):
        for of_type, value in zip(types, arguments, strict=True):
            dispatcher._Kernel._prepare_args(Packer(), of_type, value, 0, [], passed)
    for value in passed:
        if isinstance(value, Address):
            yield value.tensor
        elif isinstance(value, int):
            yield value.to_bytes(8, "little", signed=True)
        else:
            yield bytes(value)
