"""A substitute for the launcher of CUDA kernels."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dilkit.backends.cuda.table import CudaKernel
from dilkit.backends.tiles.schedule import BRANCH, TILE


@dataclass(frozen=True)
class Launch:
    kernel: CudaKernel
    blocks: int
    arguments: Any
    tiles: list[tuple[int, ...]]
    branches: list[tuple[int, ...]]
    counter: int | None


class RecordingLauncher:
    """A launcher on the CPU that runs nothing; `resident` blocks fit on its device."""

    def __init__(self, resident: int = 4):
        self.blocks, self.launches = resident, []
        self._counter = ctypes.c_int32(0)

    def resident(self, kernel: CudaKernel, device: torch.device) -> int:
        return self.blocks

    at_least_resident = resident

    def launch(self, kernel: CudaKernel, blocks: int, arguments, device: torch.device):
        tiles = _records(int(arguments["tiles"]), int(arguments["tile_count"]), TILE)
        branches = _records(int(arguments["branches"]), abs(int(arguments["branch_count"])), BRANCH)
        counter = ctypes.c_int32.from_address(int(arguments["counter"])).value if arguments["counter"] else None
        self.launches.append(Launch(kernel, blocks, arguments.copy(), tiles, branches, counter))

    def counter(self, device: torch.device) -> int:
        return ctypes.addressof(self._counter)


def _records(address: int, count: int, kind: np.dtype[Any]) -> list[tuple[int, ...]]:
    return np.frombuffer(ctypes.string_at(address, count * kind.itemsize), kind).tolist()
