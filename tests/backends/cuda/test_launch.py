"""Launches through CuPy."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cuda_fakes import RecordingLauncher

from dilkit import Pattern
from dilkit.backends.cuda.arguments import ARGUMENTS
from dilkit.backends.cuda.backend import CupyRaw
from dilkit.backends.cuda.launch import CupyLauncher, Multiprocessors, Stream, blocks_at_once
from dilkit.backends.cuda.table import CudaKernel, kernel_for
from dilkit.backends.tiles import counters
from dilkit.inputs import Inputs
from dilkit.problem import Problem

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
KERNEL = CudaKernel("file.cu", "kernel", threads=96, blocks=2, tile_rows=64)
LARGE = CudaKernel("file.cu", "large", threads=128, blocks=1, tile_rows=64, shared_bytes=70_000)
NO_ARGUMENTS = np.zeros((), ARGUMENTS)


class FakeCupy:
    """The part of CuPy that launches use: two devices of 10 multiprocessors with 3 blocks each."""

    def __init__(self):
        self.events: list[Any] = []
        self.device, self.stream, self.capturing, self.occupancy = 0, 77, False, 3
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

    def note(self, what: str, *facts):
        self.events.append((what, self.device, *facts))

    def of(self, what: str) -> list[Any]:
        return [event for event in self.events if event[0] == what]

    @contextlib.contextmanager
    def guard(self, device: torch.device) -> Iterator[None]:
        """torch's device guard; CuPy's own could make a context on a device without one."""
        before, self.device = self.device, device.index
        yield
        self.device = before

    def _occupancy(self, function: str, threads: int, shared: int) -> int:
        self.note("occupancy", function, threads, shared)
        return self.occupancy


class _Module:
    def __init__(self, cupy: FakeCupy):
        self.cupy = cupy

    def load(self, code: bytes):
        self.cupy.note("load", code)

    def get_function(self, name: str):
        return _Function(self.cupy, name)


class _Function:
    def __init__(self, cupy: FakeCupy, name: str):
        self.cupy, self.name, self.ptr = cupy, name, f"<{name}>"

    def __call__(self, grid, block, arguments, shared_mem: int = 0, stream=None):
        self.cupy.note("launch", self.name, grid, block, arguments, shared_mem, stream.ptr)


@pytest.fixture
def cupy(monkeypatch) -> FakeCupy:
    """CuPy and torch's CUDA, both recorded; kernels are not compiled: their code is what they and their device are.

    Of a device torch says what torch 2.6 does.
    """
    fake = FakeCupy()
    each = dict(multi_processor_count=10, max_threads_per_multi_processor=1536)
    properties = SimpleNamespace(major=8, minor=6, name="a device", **each)
    for name, module in {"cupy": fake, "cupy.cuda": fake.cuda, "cupy.cuda.driver": fake.cuda.driver}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: fake.stream + index, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(torch.cuda, "device", fake.guard)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: fake.device)
    monkeypatch.setattr("dilkit.backends.cuda.compile.code_of", lambda *asked: repr(asked).encode())
    return fake


def test_a_launch_goes_to_the_current_stream_of_its_device(cupy):
    launcher = CupyLauncher()
    launcher.launch(KERNEL, 5, NO_ARGUMENTS, SECOND)
    launcher.launch(LARGE, 7, NO_ARGUMENTS, FIRST)
    without_names = NO_ARGUMENTS.view((np.void, NO_ARGUMENTS.nbytes))
    assert cupy.of("launch") == [
        ("launch", 1, "kernel", (5,), (96,), (without_names,), 0, 78),
        ("launch", 0, "large", (7,), (128,), (without_names,), 70_000, 77),
    ]
    assert all(event[5][0].dtype.names is None for event in cupy.of("launch")), "CuPy has fields described for 0.1 ms"


def test_a_kernel_is_loaded_once_on_each_device(cupy):
    launcher = CupyLauncher()
    for device in (FIRST, SECOND, FIRST, SECOND):
        launcher.launch(KERNEL, 1, NO_ARGUMENTS, device)
    code = repr((KERNEL, (8, 6))).encode()
    assert cupy.of("load") == [("load", 0, code), ("load", 1, code)]


def test_shared_memory_comes_before_caches_and_dynamic_one_is_asked_for(cupy):
    launcher = CupyLauncher()
    launcher.resident(KERNEL, FIRST)
    assert cupy.of("attribute") == [("attribute", 0, "<kernel>", "carve-out", 100)]
    launcher.resident(LARGE, SECOND)
    assert cupy.of("attribute")[1:] == [
        ("attribute", 1, "<large>", "carve-out", 100),
        ("attribute", 1, "<large>", "dynamic shared memory", 70_000),
    ]


def test_resident_blocks_are_what_fits_on_all_multiprocessors(cupy):
    assert CupyLauncher().resident(LARGE, SECOND) == 30
    assert cupy.of("occupancy") == [("occupancy", 1, "<large>", 128, 70_000)]


def test_a_kernel_that_does_not_fit_is_refused(cupy):
    cupy.occupancy = 0
    with pytest.raises(RuntimeError, match=r"'large'.*does not fit on a device"):
        CupyLauncher().resident(LARGE, FIRST)


def test_nothing_is_loaded_while_a_graph_is_captured(cupy):
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
def test_the_true_cupy_takes_our_arguments():
    """CuPy turns the arguments into addresses before it needs a driver."""
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


def test_the_launcher_asks_for_the_counter_of_the_current_stream(cupy, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(counters, "cuda_stream_number", lambda stream: asked.append((stream, cupy.device)) or stream)
    launcher = CupyLauncher()
    one, other = launcher.counter(FIRST), launcher.counter(SECOND)
    assert asked == [(77, 0), (78, 1)], "of the device that is current"
    assert launcher.counter(FIRST) == one != other
    cupy.stream = 99
    assert launcher.counter(FIRST) not in (one, other)
    cupy.capturing = True
    assert len({one, other, *(launcher.counter(FIRST) for _ in range(3))}) == 5


KIB = 1024


def test_threads_and_shared_memory_limit_as_well():
    kernel = CudaKernel("file.cu", "kernel", threads=128, blocks=4, tile_rows=128, shared_bytes=20 * KIB)
    device = Multiprocessors(count=10, threads=1024, shared_bytes=100 * KIB)
    assert blocks_at_once(kernel, device) == 40
    assert blocks_at_once(kernel, replace(device, shared_bytes=60 * KIB)) == 30
    assert blocks_at_once(kernel, replace(device, threads=256)) == 20
    assert blocks_at_once(replace(kernel, shared_bytes=0), device) == 40
    assert blocks_at_once(kernel, replace(device, shared_bytes=0)) == 10


def test_the_choice_of_tiles_compiles_nothing(cupy):
    """Too few tiles for tall ones: of these not a kernel is loaded."""
    problem = Problem(pattern=Pattern([512], [1]), seq=512, heads=1, head_dim=64, dtype="bfloat16")
    assert CupyLauncher().at_least_resident(kernel_for("forward", "bfloat16", 64, (8, 6)), SECOND) == 20
    assert cupy.events == []
    launcher, x, asked = RecordingLauncher(), torch.zeros(1, 512, 1, 64, dtype=torch.bfloat16), list[int]()
    launcher.at_least_resident = lambda kernel, device: 20
    launcher.resident = lambda kernel, device: asked.append(kernel.tile_rows) or 4
    CupyRaw(launcher, (8, 6)).forward(Inputs(x, x, x), problem)
    assert asked == [64]
