"""Calls of `cupy_raw` through the true CuPy, in a process of its own, over a driver that runs nothing.

    python calls.py <libcuda.so.1>        prints as JSON what each call did: see `Calls.make`

True: dilkit, CuPy's modules, functions and driver calls, NVRTC, torch's device guard. Substitutes: the driver, whose library is
loaded before CuPy asks for one; two functions of CUDA's runtime, whose copy in CuPy wants tables that only NVIDIA's driver has;
torch's runtime, which a build for CPUs lacks. Memory of the device is the CPU's.
"""

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

DEVICE, STREAM = 1, 4096
"""The one of two devices that tensors are said to be on, and the handle of its stream."""
INVALID_VALUE, INVALID_CONTEXT, INVALID_HANDLE, CAPTURE_UNSUPPORTED = 1, 201, 400, 900
MAX_DYNAMIC, CARVEOUT = 8, 9
STATIC_LIMIT, OPT_IN_LIMIT, OF_MULTIPROCESSOR, MOST_THREADS = 48 * 1024, 227 * 1024, 228 * 1024, 1024


class Driver:
    """A substitute for CUDA's driver, which notes calls."""

    def __init__(self, path: str):
        self.events: list[tuple[str, int, int, str, int, int]] = []
        self.current, self.contexts = -1, [False, False]
        self.stream, self.stream_number, self.captures = 0, 0, False
        self.functions: list[SimpleNamespace] = []
        self.run: Callable[[str, int], None]
        self.text = ctypes.create_string_buffer(b"refused by the stub")
        self._answer = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64))(self._call)
        ctypes.CDLL(path).stub_answer(self._answer)

    def _call(self, name: bytes, given) -> int:
        code: int | None = getattr(self, name.decode())(*given[:10])
        return code or 0

    def note(self, call: str, name: str, first: int, second: int, stream: int = 0):
        self.events.append((call, self.current, stream, name, first, second))

    def exchange(self, device: int) -> int:
        """Make a device current, which gives it a context; the one before."""
        before, self.current = self.current, device
        self.contexts[device] = True
        return max(before, 0)

    def attribute(self, what: int, device: int) -> int:
        self.note("cuDeviceGetAttribute", "", what, device)
        return OF_MULTIPROCESSOR

    def cuModuleLoadData(self, place: int, image: int, *_: int) -> int | None:
        if self.current < 0 or self.captures:
            return CAPTURE_UNSUPPORTED if self.captures else INVALID_CONTEXT
        if ctypes.string_at(image, 4) != b"\x7fELF":
            return INVALID_VALUE
        ctypes.c_int64.from_address(place).value = 1 + self.current
        return self.note("cuModuleLoadData", "", 0, 0)

    def cuModuleUnload(self, *_: int):
        pass

    def cuModuleGetFunction(self, place: int, module: int, name: int, *_: int):
        self.functions.append(SimpleNamespace(device=module - 1, name=ctypes.string_at(name).decode(), most_dynamic=STATIC_LIMIT))
        ctypes.c_int64.from_address(place).value = len(self.functions)
        self.note("cuModuleGetFunction", self.functions[-1].name, 0, 0)

    def cuFuncSetAttribute(self, handle: int, *given: int) -> int | None:
        function, (attribute, value) = self.functions[handle - 1], (ctypes.c_int(x).value for x in given[:2])
        if function.device != self.current:
            return INVALID_HANDLE
        if not 0 <= value <= {MAX_DYNAMIC: OPT_IN_LIMIT, CARVEOUT: 100}[attribute]:
            return INVALID_VALUE
        if attribute == MAX_DYNAMIC:
            function.most_dynamic = value
        return self.note("cuFuncSetAttribute", function.name, attribute, value)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, place: int, handle: int, threads: int, dynamic: int, *_: int
    ) -> int | None:
        function = self.functions[handle - 1]
        ctypes.c_int.from_address(place).value = 1
        self.note("cuOccupancyMaxActiveBlocksPerMultiprocessor", function.name, ctypes.c_int(threads).value, dynamic)
        return None if function.device == self.current else INVALID_HANDLE

    def cuLaunchKernel(self, handle: int, *given: int) -> int | None:
        function, (*sizes, dynamic), (stream, parameters) = self.functions[handle - 1], map(unsigned, given[:7]), given[7:9]
        if function.device != self.current or (stream and self.current != DEVICE):
            return INVALID_HANDLE
        blocks, *_, threads = sizes[:4]
        if sizes != [blocks, 1, 1, threads, 1, 1] or not 0 < threads <= MOST_THREADS or not 0 < blocks < 2**31:
            return INVALID_VALUE
        if dynamic > function.most_dynamic:
            return INVALID_VALUE
        self.note("captured" if self.captures else "cuLaunchKernel", function.name, blocks, dynamic << 32 | threads, stream)
        self.run(function.name, ctypes.c_int64.from_address(parameters).value)
        return None

    def cuStreamGetId(self, stream: int, place: int, *_: int) -> int | None:
        ctypes.c_int64.from_address(place).value = self.stream_number if stream else 0
        return INVALID_HANDLE if stream and self.current != DEVICE else None

    def cuGetErrorName(self, code: int, place: int, *_: int):
        ctypes.c_int64.from_address(place).value = ctypes.addressof(self.text)

    cuGetErrorString = cuGetErrorName


def unsigned(number: int) -> int:
    """An `unsigned` as C passes it: the rest of the register is not said to be 0."""
    return number & 0xFFFFFFFF


def stand_in_for_cudas_runtime(driver: Driver):
    """Before CuPy's modules bind its function that makes a context current on a thread: here one is."""
    from cupy_backends.cuda.api import runtime

    def ensure_context():
        return driver.current >= 0  # not None, of which ctypes would hand over no reference

    python = ctypes.pythonapi
    python.PyCapsule_GetName.restype, python.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    python.PyCapsule_New.restype = ctypes.py_object
    python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    kept.append(ctypes.PYFUNCTYPE(ctypes.py_object)(ensure_context))
    kept.append(python.PyCapsule_GetName(runtime.__pyx_capi__["_ensure_context"]))
    runtime.__pyx_capi__["_ensure_context"] = python.PyCapsule_New(ctypes.cast(kept[0], ctypes.c_void_p), kept[1], None)
    runtime.deviceGetAttribute = driver.attribute


kept: list[Any] = []
"""Objects that capsules point to."""


def stand_in_for_torchs_runtime(driver: Driver):
    """Give torch a runtime: its guard makes no device without a context current again."""
    import torch

    torch.cuda._exchange_device = driver.exchange
    torch.cuda._maybe_exchange_device = lambda device: driver.exchange(device) if driver.contexts[device] else driver.current
    torch.cuda.current_device = lambda: max(driver.current, 0)
    torch._C._cuda_getCurrentRawStream = lambda index: driver.stream
    torch.cuda.is_current_stream_capturing = lambda: driver.captures
    properties = dict(major=9, minor=0, name="stub", multi_processor_count=2, max_threads_per_multi_processor=2048)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(**properties)
    true = torch.Tensor.to
    torch.Tensor.to = lambda self, *args, **options: self if str(args[0]).startswith("cuda") else true(self, *args, **options)


class Calls:
    def __init__(self, driver: Driver):
        import torch

        import dilkit
        from dilkit.backends.cuda.backend import CupyRaw
        from dilkit.inputs import Inputs

        class OnDevice(torch.Tensor):
            device = torch.device("cuda", DEVICE)

        class Backend(CupyRaw):
            def launch_role(self, role, tensors, *rest):
                super().launch_role(role, tensors | {"query": tensors["query"].as_subclass(OnDevice)}, *rest)

        self.driver, self.backend = driver, Backend(capability=(9, 0))
        options = dict(seq=256, heads=2, head_dim=128, dtype="float16", is_causal=True, requires_grad=True)
        self.problem = dilkit.Problem(pattern=dilkit.Pattern([256], [1]), **options)
        self.inputs = Inputs(*torch.zeros(3, 1, 256, 2, 128, dtype=torch.float16))
        driver.run = self._note

    def make(self, stream: int) -> dict[str, Any]:
        """Forward and backward on a stream: events, counters, whether arguments arrived, which device is current."""
        driver, inputs = self.driver, self.inputs
        driver.stream, driver.events, self.counters, self.arrived = stream, [], list[int](), True
        driver.stream_number += 1  # a new stream, with the handle of one that is gone
        out, lse = self.backend.forward(inputs, self.problem)
        self.backend.backward(inputs.query, inputs, out, lse, self.problem)
        seen = dict(events=driver.events, stream=stream, counters=self.counters, arrived=self.arrived)
        return seen | dict(device=driver.current, contexts=[*driver.contexts])

    def _note(self, name: str, given: int):
        """At once, also of what is captured: memory of a call is another's after it."""
        import numpy as np

        from dilkit.backends.cuda.arguments import ARGUMENTS

        arguments = np.frombuffer(ctypes.string_at(given, ARGUMENTS.itemsize), ARGUMENTS)[0]
        self.counters.append(int(arguments["counter"]))
        addresses = [int(arguments[view]["data"]) for view in ("query", "key", "value")]
        here = [x.data_ptr() for x in self.inputs[:3]]
        self.arrived &= bool(arguments["seq"] == 256 and (name == "row_dots" or addresses == here))


def main():
    driver = Driver(sys.argv[1])
    stand_in_for_cudas_runtime(driver)
    stand_in_for_torchs_runtime(driver)
    calls = Calls(driver)
    seen = {"first": calls.make(0)}
    driver.exchange(0)
    seen |= {"on a stream": calls.make(STREAM), "on the next stream": calls.make(STREAM)}
    driver.captures = True
    print(json.dumps(seen | {"captured": calls.make(STREAM)}))


if __name__ == "__main__":
    main()
