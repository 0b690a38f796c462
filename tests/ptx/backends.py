"""The backends in Triton and in numba.cuda as they are, but for the device: the CPU, which runs the PTX of what they launch.

Each is imported when it is opened, for the other may be all that is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from helpers.host_launcher import Span
from ptx.launcher import OnPTX, Options, PTXError
from ptx.recorded import RecordedMachine

from dilkit.backend import missing_modules
from dilkit.backends.tiles.backend import TiledBackend
from dilkit.decoding.placed import PlacedStep
from dilkit.device import Capability
from dilkit.problem import Problem

MODULES = {
    "cupy_raw": ("cupy",),
    "triton": ("triton",),
    "numba_cuda": ("numba_cuda", "nvidia.cuda_nvcc", "nvidia.cuda_nvrtc"),
}
"""By backend, what compiles its kernels."""


def is_installed(name: str) -> bool:
    return not missing_modules(MODULES[name])


@contextmanager
def opened(name: str, capability: Capability, options: Options) -> Iterator[tuple[TiledBackend, RecordedMachine | None]]:
    """A backend for tensors of the CPU, as on devices of `capability`, and the machine that it launches on, if it records."""
    if name == "cupy_raw":
        yield OnPTX(capability, options), None
    else:
        with (_triton if name == "triton" else _numba)(capability, machine := RecordedMachine(options)) as backend:
            yield backend, machine


@contextmanager
def _triton(capability: Capability, machine: RecordedMachine) -> Iterator[TiledBackend]:
    from ptx.launches.from_triton import redirected

    from dilkit.backends.triton.backend import TritonTiles
    from dilkit.backends.triton.launch import DeviceLauncher
    from dilkit.backends.triton.sizes import Sizes

    numbers = torch.zeros(2, dtype=torch.int32)

    class Launcher(DeviceLauncher):
        """Says what a device would say: how many programs run at once, and where they count."""

        def resident(self, sizes: Sizes, device: torch.device) -> int:
            return machine.options.resident

        def counter(self, device: torch.device) -> int:
            return numbers.data_ptr()

    class TritonOnPTX(TritonTiles):
        """The backend as it is, for tensors of the CPU."""

        requires = ("torch",)
        limits = replace(TritonTiles.limits, devices=frozenset({"cpu"}), min_capability=None)
        priority = -100

        def proof_facts(self, problem: Problem) -> tuple[str, ...]:
            return ()

        def launch_step(self, placed: PlacedStep) -> tuple[torch.Tensor, torch.Tensor]:
            counter = numbers.data_ptr(), numbers.nbytes, "counter", False
            with machine.reaching([counter, *_stored(placed)]):
                results = super().launch_step(placed)
            if numbers.any():
                raise PTXError(f"it leaves its counter at {numbers.tolist()}")
            return results

    with redirected(capability, machine):
        backend = TritonOnPTX(Launcher(capability))
        backend.name = "Triton's PTX on sm_{}{}".format(*capability)  # type: ignore[misc]
        yield backend


def _stored(placed: PlacedStep) -> Iterator[Span]:
    """The tensors that the tables of a step lead to."""
    from dilkit.backends.tiles.steps import counts_of

    counts = counts_of(placed)
    itemsize = placed.step.stored[0].element_size()
    sizes = [itemsize] * counts.stored + [8] * counts.positions + [1] * counts.unseen
    for number, ((address, reach, *_), size) in enumerate(zip(placed.memory.tolist(), sizes, strict=True)):
        if reach:
            yield address, reach * size, f"tensor {number} of the step", number >= counts.stored


@contextmanager
def _numba(capability: Capability, machine: RecordedMachine) -> Iterator[TiledBackend]:
    from ptx.launches.from_numba import redirected

    from dilkit.backends.numba.backend import NumbaCuda

    class NumbaOnPTX(NumbaCuda):
        """The backend as it is, for tensors of the CPU."""

        requires = ("torch",)
        limits = replace(NumbaCuda.limits, devices=frozenset({"cpu"}), min_capability=None)
        priority = -100

        def proof_facts(self, problem: Problem) -> tuple[str, ...]:
            return ()

    with redirected(capability, machine):
        backend = NumbaOnPTX()
        backend.name = "numba's PTX on sm_{}{}".format(*capability)  # type: ignore[misc]
        yield backend
