"""Stand-ins for the CUDA runtime: they record what is asked of them."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dilkit.backends.cuda.table import CudaKernel
from dilkit.backends.tiles.schedule import BRANCH, TILE


@dataclass(frozen=True)
class Launch:
    """One launch, and what lay at its addresses while it ran."""

    kernel: CudaKernel
    blocks: int
    arguments: Any
    tiles: list[tuple[int, ...]]
    branches: list[tuple[int, ...]]
    counter: int | None


class RecordingLauncher:
    """A launcher on the CPU that runs nothing; `resident` blocks fit on its device."""

    def __init__(self, resident: int = 4) -> None:
        self.blocks, self.launches = resident, []
        self._counter = ctypes.c_int32(0)

    def resident(self, kernel: CudaKernel, device: torch.device) -> int:
        return self.blocks

    at_least_resident = resident

    def launch(self, kernel: CudaKernel, blocks: int, arguments: Any, device: torch.device) -> None:
        tiles = _records(int(arguments["tiles"]), int(arguments["tile_count"]), TILE)
        branches = _records(int(arguments["branches"]), abs(int(arguments["branch_count"])), BRANCH)
        counter = ctypes.c_int32.from_address(int(arguments["counter"])).value if arguments["counter"] else None
        self.launches.append(Launch(kernel, blocks, arguments.copy(), tiles, branches, counter))

    def counter(self, device: torch.device) -> int:
        return ctypes.addressof(self._counter)


def _records(address: int, count: int, kind: np.dtype[Any]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = np.frombuffer(ctypes.string_at(address, count * kind.itemsize), kind).tolist()
    return found


class FakeCupy:
    """As much of CuPy as launches use, on two devices of 10 multiprocessors that hold 3 blocks each."""

    def __init__(self, stream: int = 77) -> None:
        self.events: list[Any] = []
        self.device, self.stream, self.capturing, self.occupancy = 0, stream, False, 3
        driver = SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic shared memory",
            CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT="carve-out",
            funcSetAttribute=lambda function, what, value: self.note("attribute", function, what, value),
            occupancyMaxActiveBlocksPerMultiprocessor=self._occupancy,
        )
        attributes = {"shared memory of a multiprocessor": 102400}
        runtime = SimpleNamespace(
            cudaDevAttrMaxSharedMemoryPerMultiprocessor="shared memory of a multiprocessor",
            deviceGetAttribute=lambda what, device: attributes[what],
        )
        self.cuda = SimpleNamespace(Module=lambda: _Module(self), driver=driver, runtime=runtime)

    def note(self, what: str, *facts: Any) -> None:
        """Record something that happened, with the device on which it did."""
        self.events.append((what, self.device, *facts))

    def of(self, what: str) -> list[Any]:
        """The recorded things of one kind."""
        return [event for event in self.events if event[0] == what]

    @contextlib.contextmanager
    def guard(self, device: torch.device) -> Iterator[None]:
        """torch's device guard. CuPy has none here: its own goes back to a device that may have no context, and makes one."""
        before, self.device = self.device, device.index
        yield
        self.device = before

    def _occupancy(self, function: str, threads: int, shared: int) -> int:
        self.note("occupancy", function, threads, shared)
        return self.occupancy


class _Module:
    def __init__(self, cupy: FakeCupy) -> None:
        self.cupy = cupy

    def load(self, code: bytes) -> None:
        self.cupy.note("load", code)

    def get_function(self, name: str) -> Any:
        cupy = self.cupy

        class Function:
            ptr = f"<{name}>"

            def __call__(self, grid: Any, block: Any, arguments: Any, shared_mem: int = 0, stream: Any = None) -> None:
                cupy.note("launch", name, grid, block, arguments, shared_mem, stream.ptr)

        return Function()


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    """CuPy and torch's CUDA, both recorded; kernels are not compiled: their code is what they and their device are.

    Of a device torch says what torch 2.6 does.
    """
    fake = FakeCupy()
    each = dict(multi_processor_count=10, max_threads_per_multi_processor=1536)
    properties = SimpleNamespace(major=8, minor=6, name="a device", **each)
    for name, module in {"cupy": fake, "cupy.cuda": fake.cuda, "cupy.cuda.driver": fake.cuda.driver}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=fake.stream + device.index))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(torch.cuda, "device", fake.guard)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: fake.device)
    monkeypatch.setattr("dilkit.backends.cuda.compile.code_of", lambda *asked: repr(asked).encode())
    return fake
