"""The backend in CUDA, whose launches go to the emulator: NVRTC makes the PTX, and arguments are a record in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from helpers.host_launcher import argument_spans, bias_spans, step_spans
from ptx.emulator import Emulator, Options, PTXError

from dilkit.backends.cuda import compile as cuda_compile
from dilkit.backends.cuda.backend import CupyRaw
from dilkit.backends.cuda.table import CudaKernel
from dilkit.backends.tiles.schedule import MOST_ROWS
from dilkit.device import Capability


class PTXLauncher:
    """Launcher in place of CuPy's, for devices of `capability`. `emulator` runs the kernels."""

    def __init__(self, capability: Capability, options: Options) -> None:
        self.capability, self.emulator = capability, Emulator(options)
        self._counter = np.zeros(2, np.int32)

    def resident(self, kernel: CudaKernel, device: object = None) -> int:
        return self.emulator.options.resident

    at_least_resident = resident

    def counter(self, device: object = None) -> int:
        return int(self._counter.ctypes.data)

    def launch(self, kernel: CudaKernel, blocks: int, arguments: Any, device: object = None) -> None:
        """Run `blocks` blocks of `kernel`, all at once. Raises PTXError."""
        self.run(kernel, (), blocks, arguments)

    def run(self, kernel: CudaKernel, numbers: tuple[int, ...], grid: int, arguments: Any) -> None:
        """Run only the blocks of these `numbers`, of a launch of `grid` blocks. Raises PTXError."""
        arguments = np.array(arguments)
        self.emulator.launch(
            ptx_of(kernel, self.capability),
            [arguments.tobytes()],
            **dict(blocks=grid, threads=kernel.threads, shared_bytes=kernel.shared_bytes),
            **dict(memory=spans_of(kernel, grid, arguments[()]), resident=grid, numbers=numbers),
        )
        if arguments["counter"] and self._counter.any():
            raise PTXError(f"{kernel.name}: it leaves its counter at {self._counter}")


class CudaOnPTX(CupyRaw):
    """The backend for tensors of the CPU, as on devices of the launcher's capability; `hopper`: with tall tiles alone."""

    requires = ("torch",)
    limits = replace(CupyRaw.limits, devices=frozenset({"cpu"}), min_capability=None)
    priority = -100

    def __init__(self, launcher: PTXLauncher, hopper: bool = False) -> None:
        super().__init__(launcher, launcher.capability, MOST_ROWS if hopper else None, hopper)
        self.name = "PTX on sm_{}{}".format(*launcher.capability)  # type: ignore[misc]


def spans_of(kernel: CudaKernel, blocks: int, arguments: Any) -> list[tuple[int, int, str, bool]]:
    """Return the memory that a launch may touch."""
    step = step_spans(arguments, kernel.macros) if arguments["step"]["memory"] else []
    tensors = argument_spans(arguments, 2 if kernel.macros["STORAGE"] else 4)
    return [*tensors, *bias_spans(arguments, kernel.macros, blocks), *step]


@lru_cache(maxsize=64)
def ptx_of(kernel: CudaKernel, capability: Capability) -> str:
    """Compile `kernel` to PTX for devices of `capability`. Raises RuntimeError as `code_of` does."""
    options = cuda_compile.options_of(kernel, capability)
    virtual = tuple(o.replace("=sm_", "=compute_") for o in options if not o.startswith("--ptxas-options"))
    texts = {path.name: path.read_text() for path in sorted(cuda_compile.SOURCES.glob("*.cu*"))}
    headers = {name: text.encode() for name, text in texts.items() if name.endswith(".cuh")}
    compiler = cuda_compile.load_nvrtc()
    names = [name.encode() for name in headers]
    program = compiler.createProgram(texts[kernel.source], kernel.source, list(headers.values()), names)
    try:
        compiler.compileProgram(program, virtual)
        text: bytes = compiler.getPTX(program)
    finally:
        compiler.destroyProgram(program)
    return text.decode().rstrip("\0")
