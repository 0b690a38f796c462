"""Launches through CuPy: what CuPy and torch are asked for, by recording fakes of both, and that the true CuPy accepts it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.cuda_fakes import FakeCupy, cupy

from dilkit.backends.cuda.arguments import ARGUMENTS
from dilkit.backends.cuda.launch import CupyLauncher, Stream
from dilkit.backends.cuda.table import CudaKernel

__all__ = ["cupy"]

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
KERNEL = CudaKernel("file.cu", "kernel", threads=96, blocks=2, tile_rows=64)
LARGE = CudaKernel("file.cu", "large", threads=128, blocks=1, tile_rows=64, shared_bytes=70_000)
NO_ARGUMENTS = np.zeros((), ARGUMENTS)


def test_a_launch_goes_to_the_current_stream_of_its_device(cupy: FakeCupy) -> None:
    launcher = CupyLauncher()
    launcher.launch(KERNEL, 5, NO_ARGUMENTS, SECOND)
    launcher.launch(LARGE, 7, NO_ARGUMENTS, FIRST)
    without_names = NO_ARGUMENTS.view((np.void, NO_ARGUMENTS.nbytes))
    assert cupy.of("launch") == [
        ("launch", 1, "kernel", (5,), (96,), (without_names,), 0, 78),
        ("launch", 0, "large", (7,), (128,), (without_names,), 70_000, 77),
    ]
    assert all(event[5][0].dtype.names is None for event in cupy.of("launch")), "CuPy has fields described for 0.1 ms"


def test_a_kernel_is_loaded_once_on_each_device(cupy: FakeCupy) -> None:
    launcher = CupyLauncher()
    for device in (FIRST, SECOND, FIRST, SECOND):
        launcher.launch(KERNEL, 1, NO_ARGUMENTS, device)
    code = repr((KERNEL, (8, 6))).encode()
    assert cupy.of("load") == [("load", 0, code), ("load", 1, code)]


def test_shared_memory_comes_before_caches_and_dynamic_one_is_asked_for(cupy: FakeCupy) -> None:
    launcher = CupyLauncher()
    launcher.resident(KERNEL, FIRST)
    assert cupy.of("attribute") == [("attribute", 0, "<kernel>", "carve-out", 100)]
    launcher.resident(LARGE, SECOND)
    assert cupy.of("attribute")[1:] == [
        ("attribute", 1, "<large>", "carve-out", 100),
        ("attribute", 1, "<large>", "dynamic shared memory", 70_000),
    ]


def test_resident_blocks_are_what_fits_on_all_multiprocessors(cupy: FakeCupy) -> None:
    assert CupyLauncher().resident(LARGE, SECOND) == 30
    assert cupy.of("occupancy") == [("occupancy", 1, "<large>", 128, 70_000)]


def test_a_kernel_that_does_not_fit_is_refused(cupy: FakeCupy) -> None:
    cupy.occupancy = 0
    with pytest.raises(RuntimeError, match=r"'large'.*does not fit on a device"):
        CupyLauncher().resident(LARGE, FIRST)


def test_nothing_is_loaded_while_a_graph_is_captured(cupy: FakeCupy) -> None:
    launcher = CupyLauncher()
    cupy.capturing = True
    with pytest.raises(RuntimeError, match=r"kernel is not loaded on cuda:0.*make the same call once before"):
        launcher.launch(KERNEL, 1, NO_ARGUMENTS, FIRST)
    assert cupy.events == []
    cupy.capturing = False
    launcher.launch(KERNEL, 1, NO_ARGUMENTS, FIRST)
    cupy.capturing = True
    launcher.launch(KERNEL, 2, NO_ARGUMENTS, FIRST)
    assert [event[3] for event in cupy.of("launch")] == [(1,), (2,)]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU, on which the launch of no kernel is an error")
def test_the_true_cupy_takes_our_arguments() -> None:
    """Its launch turns the arguments into addresses before it looks for a driver, which is all that is missing here."""
    true = pytest.importorskip("cupy", reason="cupy is not installed: make kernels")
    function = true.cuda.Function.__new__(true.cuda.Function)
    with pytest.raises(true.cuda.runtime.CUDARuntimeError):
        function((3,), (128,), (NO_ARGUMENTS,), shared_mem=0, stream=Stream(77))
    with pytest.raises(TypeError):
        function((3,), (128,), (np.zeros(2, ARGUMENTS),), shared_mem=0, stream=Stream(77))
    assert callable(true.cuda.Module().load)
    assert callable(true.cuda.Module().get_function)
    assert {"funcSetAttribute", "occupancyMaxActiveBlocksPerMultiprocessor"} <= set(dir(true.cuda.driver))
    for name in ("MAX_DYNAMIC_SHARED_SIZE_BYTES", "PREFERRED_SHARED_MEMORY_CARVEOUT"):
        assert isinstance(getattr(true.cuda.driver, f"CU_FUNC_ATTRIBUTE_{name}"), int)
    runtime = true.cuda.runtime
    with pytest.raises(runtime.CUDARuntimeError):
        runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerMultiprocessor, 0)
