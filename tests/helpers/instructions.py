"""Runs single instructions of the host shim: the kernels of `tests/backends/cuda/host/instructions.cu`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from helpers.host_compile import SHIM
from helpers.host_launcher import HostLauncher
from numpy.typing import NDArray

ARGUMENTS = np.dtype([("in", np.uint64), ("out", np.uint64), ("what", np.int32), ("amount", np.int32)])


def run(name: str, given: NDArray[Any], words: int, what: int = 0, amount: int = 0, threads: int = 32, blocks: int = 1) -> Any:
    """What kernel `name` of instructions.cu makes of the words `given`, in any order of lanes."""
    macros = dict(THREADS=threads, BLOCKS=1, STORAGE=1)
    kernel = SimpleNamespace(source=SHIM / "instructions.cu", name=name, macros=macros, shared_bytes=0)
    given = np.ascontiguousarray(given).view(np.uint32)
    results = []
    for order in ("forward", "reverse", "random"):
        out = np.zeros(words, np.uint32)
        arguments = np.array((given.ctypes.data, out.ctypes.data, what, amount), ARGUMENTS)
        HostLauncher(order, checked=order == "random").launch(kernel, blocks, arguments, memory={"in": given, "out": out})
        results.append(out)
    assert all((out == results[0]).all() for out in results)
    return results[0]
