"""Launches of the backend in Triton, redirected where Triton hands them to the driver of a GPU, with none at hand.

backend --> DeviceLauncher --> Triton: binds, specializes, compiles --> RedirectingDriver --> Launch --> machine
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from helpers.triton_compile import FakeDriver
from ptx.launches.launch import POINTER_BYTES, Argument, Launch, Machine, pointer
from triton import knobs
from triton.runtime import driver

from dilkit.backends.triton.backend import TritonTiles
from dilkit.backends.triton.launch import DeviceLauncher

DEVICES = 1_000_000
"""Numbers of devices begin here, so that kernels which other stand-ins have compiled are not taken for loaded ones."""
FORMATS = {"i1": "<?", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u1": "<?", "fp32": "<f"}
FORMATS |= {"u8": "<B", "u16": "<H", "u32": "<I", "u64": "<Q"}
SCRATCH = (Argument(bytes(POINTER_BYTES), 0),) * 2
"""What Triton appends: memory that kernels may ask for, of which these ask for none, and that of a profiler."""


@dataclass(frozen=True)
class Loaded:
    """A kernel as the driver has loaded it: what stands in for its handle."""

    name: str
    ptx: str
    shared_bytes: int


class RedirectingDriver(FakeDriver):
    """Hands launches on to a machine."""

    def __init__(self, capability: int, machine: Machine) -> None:
        super().__init__(capability)
        self.machine = machine
        self.utils = SimpleNamespace(get_device_properties=FakeDriver.utils.get_device_properties, load_binary=self._load)
        self._ptx = ""

    def get_current_device(self) -> int:
        return DEVICES + self.capability

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """What Triton calls to launch a kernel, and keeps with it: hence the driver that is active then."""
        threads = metadata.num_warps * metadata.warp_size
        types = tuple(source.signature.values())

        def launch(*given: Any) -> None:
            grid, loaded, arguments = given[:3], given[4], given[9:]
            passed = *_arguments(types, arguments), *SCRATCH
            driver.active.machine(Launch(loaded.ptx, loaded.name, grid, (threads, 1, 1), loaded.shared_bytes, passed))

        assert (metadata.num_ctas, metadata.global_scratch_size) == (1, 0)
        return launch

    def note_code(self, module: Any, function: Any, name: str, files: Mapping[str, str], code_hash: str) -> None:
        """Triton's hook before it loads a kernel, which alone is given the PTX."""
        self._ptx = next(Path(path).read_text() for kind, path in files.items() if kind.endswith(".ptx"))

    def _load(self, name: str, code: bytes, shared: int, device: int) -> tuple[Any, ...]:
        most_threads = 1024
        return None, Loaded(name, self._ptx, shared), 0, 0, most_threads


def _arguments(types: tuple[Any, ...], values: tuple[Any, ...]) -> Iterator[Argument]:
    """As Triton's launcher passes them: members of tuples one by one, constants not at all."""
    for kind, value in zip(types, values, strict=True):
        if isinstance(kind, tuple):
            yield from _arguments(kind, value)
        elif kind.startswith("*"):
            yield pointer(value)
        elif kind != "constexpr":
            yield Argument(struct.pack(FORMATS[kind], value))


@contextmanager
def redirected(capability: tuple[int, int], machine: Machine) -> Iterator[TritonTiles]:
    """The backend for tensors of the CPU, whose launches for a GPU of this `capability` go to `machine`."""
    number = capability[0] * 10 + capability[1]
    stand_in, before = RedirectingDriver(number, machine), knobs.runtime.kernel_load_start_hook
    driver.set_active(stand_in)
    knobs.runtime.kernel_load_start_hook = stand_in.note_code
    try:
        with mock.patch.object(torch.cuda, "device", return_value=nullcontext()):
            yield TritonTiles(DeviceLauncher(capability))
    finally:
        knobs.runtime.kernel_load_start_hook = before
        driver.set_active(None)  # so that the next one asks what there is
