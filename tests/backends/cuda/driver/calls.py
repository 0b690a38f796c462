"""Calls of `cupy_raw` through the true CuPy, in a process of its own, over the driver of `driver.c`.

    python calls.py <libcuda.so.1>        prints as JSON what each call did: see `Calls.make`

True: dilkit, CuPy's modules, functions and driver calls, NVRTC, torch's device guard. Stand-ins: the driver, which is loaded
before CuPy asks for one; CUDA's runtime, whose copy in CuPy wants tables that only NVIDIA's driver has (two of its functions);
torch's runtime, which a build for CPUs lacks: the current device and stream, a device's properties. Memory of the device is the
CPU's; what is launched is computed by nobody.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

DEVICE = 1
"""The one that tensors are said to be on; the other is current."""


class Driver:
    """The driver, and what it has told since it was last asked: calls with their device, stream, name and two numbers."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.events: list[tuple[str, int, int, str, int, int]] = []
        self.stream = 0
        self.run: Callable[[str, int], None] = lambda name, arguments: None
        kinds = ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_size_t
        self._listener = ctypes.CFUNCTYPE(None, *kinds)(self._note)
        self.library.stub_listen(self._listener)

    def _note(self, call: bytes, device: int, stream: int, name: bytes, first: int, second: int, at: int) -> None:
        self.events.append((call.decode(), device, stream or 0, name.decode(), first, second))
        if at:
            self.run(name.decode(), at)

    def new_stream(self) -> int:
        """A stream of `DEVICE`; the other device is current again."""
        made = ctypes.c_size_t()
        self.library.stub_set_device(DEVICE)
        assert self.library.cuStreamCreate(ctypes.byref(made), 0) == 0
        self.library.stub_set_device(0)
        return made.value

    def captures(self) -> bool:
        status = ctypes.c_int()
        assert self.library.cuStreamIsCapturing(ctypes.c_void_p(self.stream), ctypes.byref(status)) == 0
        return bool(status.value)

    def attribute(self, what: int, device: int) -> int:
        value = ctypes.c_int()
        assert self.library.cuDeviceGetAttribute(ctypes.byref(value), what, device) == 0
        return value.value


def stand_in_for_cudas_runtime(driver: Driver) -> None:
    """Before CuPy's modules bind its function that makes a context current on a thread: here one is."""
    from cupy_backends.cuda.api import runtime

    def ensure_context() -> bool:
        return driver.library.stub_current() >= 0  # not None, of which ctypes would hand over no reference

    python = ctypes.pythonapi
    python.PyCapsule_GetName.restype, python.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    python.PyCapsule_New.restype = ctypes.py_object
    python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    kept.append(ctypes.PYFUNCTYPE(ctypes.py_object)(ensure_context))
    kept.append(python.PyCapsule_GetName(runtime.__pyx_capi__["_ensure_context"]))
    runtime.__pyx_capi__["_ensure_context"] = python.PyCapsule_New(ctypes.cast(kept[0], ctypes.c_void_p), kept[1], None)
    runtime.deviceGetAttribute = driver.attribute


kept: list[Any] = []
"""What capsules point to."""


def stand_in_for_torchs_runtime(driver: Driver) -> None:
    """As torch's guard has it: a device that has no context is not made current again."""
    import torch

    def exchange(device: int) -> int:
        before = driver.library.stub_current()
        driver.library.stub_set_device(device)
        return max(before, 0)

    def maybe_exchange(device: int) -> int:
        return exchange(device) if driver.library.stub_has_context(device) else driver.library.stub_current()

    torch.cuda._exchange_device, torch.cuda._maybe_exchange_device = exchange, maybe_exchange
    torch.cuda.current_device = lambda: max(driver.library.stub_current(), 0)
    torch.cuda.current_stream = lambda device: SimpleNamespace(cuda_stream=driver.stream)
    torch.cuda.is_current_stream_capturing = driver.captures
    properties = dict(major=9, minor=0, name="stub", multi_processor_count=2, max_threads_per_multi_processor=2048)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(**properties)
    true = torch.Tensor.to
    torch.Tensor.to = lambda self, *args, **options: self if str(args[0]).startswith("cuda") else true(self, *args, **options)


class Calls:
    """Forward and backward of one problem in fp16."""

    def __init__(self, driver: Driver) -> None:
        import torch

        import dilkit
        from dilkit.backends.cuda import backend
        from dilkit.inputs import Inputs

        backend._device = lambda tensors: torch.device("cuda", DEVICE)
        self.driver, self.backend = driver, backend.CupyRaw(capability=(9, 0))
        options = dict(seq=256, heads=2, head_dim=128, dtype="float16", is_causal=True, requires_grad=True)
        self.problem = dilkit.Problem(pattern=dilkit.Pattern([256], [1]), **options)
        self.inputs = Inputs(*torch.zeros(3, 1, 256, 2, 128, dtype=torch.float16))
        driver.run = self._note

    def make(self, stream: int) -> dict[str, Any]:
        """Forward and backward on a stream: events, counters, whether arguments arrived, which device is current."""
        driver, inputs = self.driver, self.inputs
        driver.stream, driver.events, self.counters, self.arrived = stream, [], list[int](), True
        out, lse = self.backend.forward(inputs, self.problem)
        self.backend.backward(inputs.query, inputs, out, lse, self.problem)
        driver.stream = 0
        contexts = [bool(driver.library.stub_has_context(device)) for device in (0, DEVICE)]
        seen = dict(events=driver.events, stream=stream, counters=self.counters, arrived=self.arrived)
        return seen | dict(device=driver.library.stub_current(), contexts=contexts)

    def _note(self, name: str, given: int) -> None:
        """At once, also of what is captured: memory of a call is another's after it."""
        import numpy as np

        from dilkit.backends.cuda.arguments import ARGUMENTS

        arguments = np.frombuffer(ctypes.string_at(given, ARGUMENTS.itemsize), ARGUMENTS)[0]
        self.counters.append(int(arguments["counter"]))
        addresses = [int(arguments[view]["data"]) for view in ("query", "key", "value")]
        here = [x.data_ptr() for x in self.inputs[:3]]
        self.arrived &= arguments["seq"] == 256 and (name == "row_dots" or addresses == here)


def main() -> None:
    driver = Driver(sys.argv[1])
    stand_in_for_cudas_runtime(driver)
    stand_in_for_torchs_runtime(driver)
    calls = Calls(driver)
    seen = {"first": calls.make(0)}
    stream = driver.new_stream()
    seen["on a stream"] = calls.make(stream)
    driver.library.cuStreamDestroy_v2(ctypes.c_void_p(stream))
    stream = driver.new_stream()
    seen["on the next stream"] = calls.make(stream)
    driver.library.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), 0)
    seen["captured"] = calls.make(stream)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
