"""The backend in Triton, whose launches go to the emulator where Triton would hand them to a GPU's driver.

backend --> DeviceLauncher --> Triton: binds, specializes, compiles --> RedirectingDriver --> emulator
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from helpers.triton_compile import FakeDriver
from ptx.emulator import Emulator, PTXError, Span
from ptx.launches.over_tensors import launch
from triton import knobs
from triton.runtime import driver

from dilkit.backends.tiles.steps import counts_of
from dilkit.backends.triton.backend import TritonTiles
from dilkit.backends.triton.launch import DeviceLauncher
from dilkit.backends.triton.sizes import Sizes
from dilkit.decoding.protocol import PlacedStep
from dilkit.device import Capability
from dilkit.problem import Problem

DEVICES = 1_000_000
"""Number of the first device, so that kernels which other substitutes have compiled are not taken for loaded ones."""
TYPES: dict[str, type[np.generic]] = {
    **{f"{kind}{bits}": np.dtype(f"{kind}{bits // 8}").type for kind in "iu" for bits in (8, 16, 32, 64)},
    **{"i1": np.bool_, "u1": np.bool_, "fp32": np.float32},
}
SCRATCH = (np.uint64(0), np.uint64(0))
"""Memory that Triton appends: that of a kernel, which these kernels do not ask for, and that of a profiler."""


@contextmanager
def opened(capability: Capability, emulator: Emulator) -> Iterator[TritonTiles]:
    with redirected(capability, emulator) as stand_in:
        backend = TritonOnPTX(DeviceOnPTX(capability, stand_in))
        backend.name = "Triton's PTX on sm_{}{}".format(*capability)  # type: ignore[misc]
        yield backend


class DeviceOnPTX(DeviceLauncher):
    """Launcher with the answers of a device: how many programs run at once, and where they count."""

    def __init__(self, capability: Capability, stand_in: RedirectingDriver) -> None:
        super().__init__(capability)
        self.stand_in, self.numbers = stand_in, torch.zeros(2, dtype=torch.int32)

    def resident(self, sizes: Sizes, device: torch.device) -> int:
        return self.stand_in.emulator.options.resident

    def counter(self, device: torch.device) -> int:
        return self.numbers.data_ptr()


class TritonOnPTX(TritonTiles):
    requires = ("torch",)
    limits = replace(TritonTiles.limits, devices=frozenset({"cpu"}), min_capability=None)
    priority = -100
    launcher: DeviceOnPTX

    def proof_facts(self, problem: Problem) -> tuple[str, ...]:
        return ()

    def launch_step(self, placed: PlacedStep) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, stand_in = self.launcher.numbers, self.launcher.stand_in
        stand_in.memory = [(numbers.data_ptr(), numbers.nbytes, "counter", False), *_stored(placed)]
        results = super().launch_step(placed)
        stand_in.memory = []
        if numbers.any():
            raise PTXError(f"it leaves its counter at {numbers.tolist()}")
        return results


def _stored(placed: PlacedStep) -> Iterator[Span]:
    """Yield the memory of the tensors that the tables of a step lead to."""
    counts = counts_of(placed)
    itemsize = placed.step.stored[0].element_size()
    sizes = [itemsize] * counts.stored + [8] * counts.positions + [1] * counts.unseen
    for number, ((address, reach, *_), size) in enumerate(zip(placed.memory.tolist(), sizes, strict=True)):
        if reach:
            yield address, reach * size, f"tensor {number} of the step", number >= counts.stored


class RedirectingDriver(FakeDriver):
    """Driver that hands launches on to an emulator. `memory`: what kernels may touch beside their arguments."""

    def __init__(self, capability: int, emulator: Emulator) -> None:
        super().__init__(capability)
        self.emulator, self.memory = emulator, list[Span]()
        self.utils = SimpleNamespace(get_device_properties=FakeDriver.utils.get_device_properties, load_binary=self._load)
        self._ptx = ""

    def get_current_device(self) -> int:
        return DEVICES + self.capability

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Return a launcher, which Triton keeps with the kernel: at a launch it asks for the driver that is active then."""
        threads = metadata.num_warps * metadata.warp_size
        types = tuple(source.signature.values())

        def launch_loaded(*given):
            (blocks, *others), (ptx, shared_bytes) = given[:3], given[4]
            assert others == [1, 1]
            values, active = [*_passed(types, given[9:]), *SCRATCH], driver.active
            launch(active.emulator, ptx, values, active.memory, blocks=blocks, threads=threads, shared_bytes=shared_bytes)

        assert (metadata.num_ctas, metadata.global_scratch_size) == (1, 0)
        return launch_loaded

    def note_code(self, module: Any, function: Any, name: str, files: Mapping[str, str], code_hash: str) -> None:
        """Note the PTX of a kernel: Triton gives it only to this hook, before the kernel is loaded."""
        self._ptx = next(Path(path).read_text() for kind, path in files.items() if kind.endswith(".ptx"))

    def _load(self, name: str, code: bytes, shared: int, device: int) -> tuple[Any, ...]:
        handle, most_threads = (self._ptx, shared), 1024
        return None, handle, 0, 0, most_threads


def _passed(types: tuple[Any, ...], values: tuple[Any, ...]) -> Iterator[Any]:
    """Yield values as Triton's launcher passes them: members of tuples one by one, constants not at all."""
    for kind, value in zip(types, values, strict=True):
        if isinstance(kind, tuple):
            yield from _passed(kind, value)
        elif kind.startswith("*"):
            yield value
        elif kind != "constexpr":
            yield TYPES[kind](value)


@contextmanager
def redirected(capability: tuple[int, int], emulator: Emulator) -> Iterator[RedirectingDriver]:
    """Send Triton's launches for a GPU of this `capability` to `emulator`."""
    stand_in = RedirectingDriver(capability[0] * 10 + capability[1], emulator)
    before = knobs.runtime.kernel_load_start_hook
    driver.set_active(stand_in)
    knobs.runtime.kernel_load_start_hook = stand_in.note_code
    try:
        with mock.patch.object(torch.cuda, "device", return_value=nullcontext()):
            yield stand_in
    finally:
        knobs.runtime.kernel_load_start_hook = before
        driver.set_active(None)  # so that the next one asks what there is
