"""Launches CUDA kernels on the CPU: compiles a `.cu` file as C with the host shim in `cuda_host/`, and runs its blocks."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

SHIM = Path(__file__).parent / "cuda_host"
KERNELS = Path(__file__).parent.parent / "backends" / "cuda"
FLAGS = ("-x", "c", "-std=gnu11", "-O3", "-march=native", "-fno-strict-aliasing", "-fPIC", "-shared", "-Wall", "-Wno-unused")
ORDERS = {"forward": 0, "reverse": 1, "random": 2}
ERROR_BYTES = 1024

RANGE = np.dtype([("low", np.uint64), ("bytes", np.int64), ("name", np.uint64)])


class Launch(ctypes.Structure):
    """`Launch` of `cuda_host/block.h`."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("blocks", "first_block", "block_step", "order")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("shared_bytes", "range_count")),
        *((name, ctypes.c_void_p) for name in ("ranges", "error")),
    ]


class KernelError(RuntimeError):
    """A kernel did what a GPU does not allow, or does not promise."""


class HostLauncher:
    """Runs kernels with the threads of a block in `order` ("forward", "reverse", or "random" by `seed`) on `workers` cores."""

    def __init__(self, order: str = "forward", seed: int = 0, workers: int | None = None) -> None:
        self.order, self.seed = ORDERS[order], seed
        self.workers = workers or min(4, len(os.sched_getaffinity(0)))

    def launch(self, kernel: Any, blocks: int, call: Any, memory: dict[str, Any] | None = None) -> None:
        """Runs `blocks` blocks of `kernel`, which has `source` (a file of backends/cuda or a path), `name`, `macros`, `shared_bytes`.

        The kernel may touch `memory` (arrays or tensors by name), or what the views, tables and sizes of `call` say.
        Raises KernelError with the kernel, block and thread for whatever the shim catches.
        """
        call = np.ascontiguousarray(call)
        spans = ranges_of(call, kernel.macros) if memory is None else {name: span(x) for name, x in memory.items()}
        names = [ctypes.create_string_buffer(name.encode()) for name in spans]
        ranges = np.array([(*x, ctypes.addressof(n)) for x, n in zip(spans.values(), names, strict=True)], RANGE)
        copies = libraries(kernel.source, tuple(kernel.macros.items()), min(self.workers, blocks))

        def work(first: int) -> str:
            error = ctypes.create_string_buffer(ERROR_BYTES)
            about = Launch(blocks, first, len(copies), self.order, self.seed + first, kernel.shared_bytes, len(ranges))
            about.ranges, about.error = ranges.ctypes.data, ctypes.addressof(error)
            function = getattr(copies[first], f"host_launch_{kernel.name}")
            function(ctypes.c_void_p(call.ctypes.data), ctypes.byref(about))
            return error.value.decode()

        with ThreadPoolExecutor(len(copies)) as pool:
            errors = [text for text in pool.map(work, range(len(copies))) if text]
        if errors:
            raise KernelError(errors[0])


def span(array: Any) -> tuple[int, int]:
    """The address and bytes of a contiguous array or tensor."""
    return (array.ctypes.data, array.nbytes) if isinstance(array, np.ndarray) else (array.data_ptr(), array.nbytes)


def ranges_of(call: Any, macros: dict[str, int]) -> dict[str, tuple[int, int]]:
    """The memory that a `Call` speaks of, by name: address and bytes."""
    return {name: (address, size) for name, address, size in _ranges(call[()], macros) if address}


def _ranges(call: Any, macros: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    batch, seq, heads = (int(call[name]) for name in ("batch", "seq", "heads"))
    for name in ("query", "key", "value", "out", "dout", "dquery", "dkey", "dvalue"):
        view = call[name]
        own = int(call["kv_heads"]) if name in ("key", "value", "dkey", "dvalue") else heads
        last = (batch - 1) * int(view["batch"]) + (seq - 1) * int(view["row"]) + (own - 1) * int(view["head"])
        yield name, int(view["data"]), (last + int(call["head_dim"])) * (2 if macros["STORAGE"] else 4)
    for name in ("lse", "delta"):
        yield name, int(call[name]), batch * seq * heads * 4
    yield "mask", int(call["mask"]), (batch - 1) * int(call["mask_batch"]) + (seq - 1) * int(call["mask_row"]) + 1
    yield "tiles", int(call["tiles"]), int(call["tile_count"]) * 16
    yield "branches", int(call["branches"]), int(call["branch_count"]) * 16
    yield "counter", int(call["counter"]), 4


def libraries(source: str | Path, macros: tuple[tuple[str, int], ...], count: int) -> list[ctypes.CDLL]:
    """`count` copies of the library of a kernel file: each has its own shared memory and threads."""
    compiled = compile_kernel(source, macros)
    return [_copy(compiled, number) for number in range(count)]


@cache
def _copy(library: Path, number: int) -> ctypes.CDLL:
    place = library.with_suffix(f".{number}.so")
    if not place.exists():
        with _new_file(place) as fresh:
            shutil.copyfile(library, fresh)
    return ctypes.CDLL(str(place))


@cache
def compile_kernel(source: str | Path, macros: tuple[tuple[str, int], ...]) -> Path:
    """The library of a kernel file, compiled with `macros`; kept between runs, by its contents."""
    path = KERNELS / source
    defines = [f"-D{name}={value}" for name, value in macros]
    files = sorted([path, *SHIM.glob("*.h"), *KERNELS.glob("*.cuh")])
    text = [*FLAGS, *defines, _compiler_version(), *(f"{file.name}\n{file.read_text()}" for file in files)]
    place = _cache_directory() / f"{path.stem}-{hashlib.sha256(chr(0).join(text).encode()).hexdigest()[:24]}.so"
    if not place.exists():
        with _new_file(place) as fresh:
            command = ["gcc", *FLAGS, *defines, f"-I{SHIM}", f"-I{KERNELS}", "-o", str(fresh), str(path), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return place


@cache
def _compiler_version() -> str:
    return subprocess.run(["gcc", "--version"], capture_output=True, text=True, check=True).stdout


class _new_file:
    """A name to write to; what is there at the end becomes `place` at once, and nothing does on failure."""

    def __init__(self, place: Path) -> None:
        self.place, self.fresh = place, place.with_suffix(f".{os.getpid()}.new")

    def __enter__(self) -> Path:
        return self.fresh

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            os.replace(self.fresh, self.place)


def _cache_directory() -> Path:
    """A directory of the user's own, which nobody else can put libraries into."""
    place = Path(tempfile.gettempdir()) / f"dilkit-cuda-host-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.stat().st_uid != os.getuid():
        raise PermissionError(f"{place} belongs to another user; set TMPDIR")
    return place
