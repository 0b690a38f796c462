"""Launches CUDA kernels on the CPU: a launcher for tests, in the place of CuPy's."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import host_compile
import numpy as np

ORDERS = {"forward": 0, "reverse": 1, "random": 2}
ERROR_BYTES = 1024

QUERY_VIEWS, KEY_VIEWS = ("query", "out", "dout", "dquery"), ("key", "value", "dkey", "dvalue")


class Range(ctypes.Structure):
    """`Range` of `cuda_host/block.h`."""

    _fields_ = [("low", ctypes.c_size_t), ("bytes", ctypes.c_int64), ("name", ctypes.c_char_p)]


class Launch(ctypes.Structure):
    """`Launch` of `cuda_host/block.h`."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("blocks", "first_block", "block_step", "order")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("shared_bytes", "range_count", "array_count")),
        *((name, ctypes.POINTER(Range)) for name in ("ranges", "arrays")),
        ("error", ctypes.c_char_p),
    ]


class KernelError(RuntimeError):
    """A kernel did what a GPU does not allow, or does not promise."""


class HostLauncher:
    """Runs the threads of a block in `order` ("forward", "reverse", or "random" by `seed`), and blocks on `workers` cores.

    `checked`: every single access to memory is checked, for bounds of arrays in shared memory and for races; ten times slower.
    """

    def __init__(self, order: str = "forward", seed: int = 0, workers: int | None = None, checked: bool = False) -> None:
        self.order, self.seed, self.checked = ORDERS[order], seed, checked
        self.workers = workers or min(4, len(os.sched_getaffinity(0)))

    def resident(self, kernel: Any, device: object = None) -> int:
        """Two blocks a worker, so that both the first tile of a block and later ones are met."""
        return 2 * self.workers

    def capturing(self, device: object = None) -> bool:
        return False

    def launch(self, kernel: Any, blocks: int, call: Any, device: object = None, memory: Mapping[str, Any] | None = None) -> None:
        """Run `blocks` blocks of `kernel`: its `source`, `name`, `macros` and `shared_bytes`. Waits for them.

        The kernel may touch `memory` (contiguous arrays or tensors by name), or what the views, tables and sizes of `call` say.
        Raises KernelError with kernel, block, thread and place for whatever is caught.
        """
        call = np.array(call)
        spans = (
            call_spans(call, kernel.macros["STORAGE"]) if memory is None else [(*_span(x), name) for name, x in memory.items()]
        )
        macros = tuple(kernel.macros.items())
        count = min(self.workers, blocks)
        copies = [host_compile.library(kernel.source, macros, self.checked, number) for number in range(count)]
        path = host_compile.compile_kernel(kernel.source, macros, self.checked)
        ranges, arrays = _ranges(spans), _ranges(host_compile.arrays(path))

        def work(first: int) -> str:
            error = ctypes.create_string_buffer(ERROR_BYTES)
            sizes = kernel.shared_bytes, len(ranges), len(arrays)
            about = Launch(blocks, first, count, self.order, self.seed + first, *sizes, ranges, arrays)
            about.error = ctypes.cast(error, ctypes.c_char_p)
            getattr(copies[first], f"host_launch_{kernel.name}")(ctypes.c_void_p(call.ctypes.data), ctypes.byref(about))
            return error.value.decode()

        with ThreadPoolExecutor(count) as pool:
            errors = [text for text in pool.map(work, range(count)) if text]
        if errors:
            raise KernelError(host_compile.with_lines(errors[0], Path(path)))


def _ranges(spans: Iterable[tuple[int, int, str]]) -> Any:
    found = [Range(address, size, name.encode()) for address, size, name in spans]
    return (Range * len(found))(*found)


def _span(array: Any) -> tuple[int, int]:
    return (array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()), array.nbytes


def call_spans(call: Any, storage: int) -> list[tuple[int, int, str]]:
    """The memory that a `Call` speaks of: address, bytes and name."""
    return [(address, size, name) for name, address, size in _call_spans(call[()], 2 if storage else 4) if address and size > 0]


def _call_spans(call: Any, itemsize: int) -> Iterator[tuple[str, int, int]]:
    batch, seq, heads, kv_heads, dim = (int(call[name]) for name in ("batch", "seq", "heads", "kv_heads", "head_dim"))
    for names, own in ((QUERY_VIEWS, heads), (KEY_VIEWS, kv_heads)):
        for name in names:
            data, *strides = (int(x) for x in call[name])
            last = sum((n - 1) * stride for n, stride in zip((batch, seq, own), strides, strict=True))
            yield name, data, (last + dim) * itemsize
    for name in ("lse", "delta"):
        yield name, int(call[name]), batch * heads * seq * 4
    yield "mask", int(call["mask"]), (batch - 1) * int(call["mask_batch"]) + (seq - 1) * int(call["mask_row"]) + 1
    yield "tiles", int(call["tiles"]), int(call["tile_count"]) * 16
    yield "branches", int(call["branches"]), int(call["branch_count"]) * 16
    yield "counter", int(call["counter"]), 4
