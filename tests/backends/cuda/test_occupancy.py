"""How many blocks run at once: what is worked out from the table, beside what the compiler reports."""

from __future__ import annotations

from dataclasses import replace

import torch
from helpers.cuda_fakes import FakeCupy, RecordingLauncher, cupy
from helpers.project import ROOT

from dilkit import Pattern
from dilkit.backends.cuda.backend import CupyRaw
from dilkit.backends.cuda.launch import CupyLauncher
from dilkit.backends.cuda.occupancy import Multiprocessors, blocks_at_once
from dilkit.backends.cuda.table import CudaKernel, kernel_for
from dilkit.backends.tiles.schedule import MOST_ROWS
from dilkit.inputs import Inputs
from dilkit.problem import Problem
from dilkit.tools.bench.kernels.record import KernelsResult, KernelUse
from dilkit.tools.results.file import read_result

__all__ = ["cupy"]

KIB = 1024
LIMITS = {
    "sm_52": (2048, 32, 96, 0),
    "sm_60": (2048, 32, 64, 0),
    "sm_61": (2048, 32, 96, 0),
    "sm_70": (2048, 32, 96, 0),
    "sm_75": (1024, 16, 64, 0),
    "sm_80": (2048, 32, 164, KIB),
    "sm_86": (1536, 16, 100, KIB),
    "sm_89": (1536, 24, 100, KIB),
    "sm_90": (2048, 32, 228, KIB),
    "sm_100": (2048, 32, 228, KIB),
    "sm_120": (1536, 24, 100, KIB),
}
"""Of a multiprocessor: threads, blocks, KiB of shared memory; and bytes of that which each block takes for itself."""
REGISTERS, UNIT, WARPS_AT_ONCE = 65536, 256, 4
"""Of a multiprocessor; what a warp gets a multiple of; what warps are counted in, for there are four parts."""


def occupancy(kernel: KernelUse) -> int:
    """Blocks of a multiprocessor, by CUDA's rules, from what the compiler reports."""
    threads, blocks, kib, own = LIMITS[kernel.architecture]
    warps = kernel.threads // 32
    of_registers = REGISTERS // (-(-kernel.registers * 32 // UNIT) * UNIT) // WARPS_AT_ONCE * WARPS_AT_ONCE // warps
    return min(threads // kernel.threads, blocks, of_registers, kib * KIB // max(kernel.shared + kernel.dynamic + own, 1))


def by_table(kernel: KernelUse) -> int:
    threads, _, kib, _ = LIMITS[kernel.architecture]
    known = CudaKernel("", kernel.name, kernel.threads, kernel.blocks, kernel.tile_rows, shared_bytes=kernel.dynamic)
    return blocks_at_once(known, Multiprocessors(1, threads, kib * KIB))


def test_as_many_blocks_run_as_the_table_says_by_the_reports_in_the_docs() -> None:
    tall = [
        kernel
        for kernel in read_result(ROOT / "docs/results/kernels.json", KernelsResult).kernels()
        if kernel.tile_rows == MOST_ROWS
    ]
    assert {kernel.architecture for kernel in tall} == {name for name in LIMITS if name >= "sm_75" or len(name) > 5}
    fewer = [kernel for kernel in tall if occupancy(kernel) < by_table(kernel)]
    assert not fewer
    assert all(by_table(kernel) == kernel.blocks for kernel in tall), "neither threads nor shared memory are short"


def test_threads_and_shared_memory_limit_as_well() -> None:
    kernel = CudaKernel("file.cu", "kernel", threads=128, blocks=4, tile_rows=128, shared_bytes=20 * KIB)
    device = Multiprocessors(count=10, threads=1024, shared_bytes=100 * KIB)
    assert blocks_at_once(kernel, device) == 40
    assert blocks_at_once(kernel, replace(device, shared_bytes=60 * KIB)) == 30
    assert blocks_at_once(kernel, replace(device, threads=256)) == 20
    assert blocks_at_once(replace(kernel, shared_bytes=0), device) == 40
    assert blocks_at_once(kernel, replace(device, shared_bytes=0)) == 10


def test_the_choice_of_tiles_compiles_nothing(cupy: FakeCupy) -> None:
    """Too few tiles for tall ones: of these not a kernel is loaded."""
    tall = kernel_for("forward", "bfloat16", 64, (8, 6))
    assert CupyLauncher().at_least_resident(tall, torch.device("cuda", 1)) == 20
    assert cupy.events == []
    problem = Problem(pattern=Pattern([512], [1]), seq=512, heads=1, head_dim=64, dtype="bfloat16")
    x = torch.zeros(1, 512, 1, 64, dtype=torch.bfloat16)

    class Device(RecordingLauncher):
        asked: list[int] = []

        def resident(self, kernel: CudaKernel, device: torch.device) -> int:
            self.asked.append(kernel.tile_rows)
            return super().resident(kernel, device)

        def at_least_resident(self, kernel: CudaKernel, device: torch.device) -> int:
            return 20

    launcher = Device()
    CupyRaw(launcher, (8, 6)).forward(Inputs(x, x, x), problem)
    assert launcher.asked == [64]
