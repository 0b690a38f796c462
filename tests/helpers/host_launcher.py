"""A launcher that runs CUDA kernels on the CPU."""

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from helpers import host_compile

from dilkit.backends.tiles.schedule import BRANCH
from dilkit.decoding.protocol import Span as StepSpan, Write

ORDERS = {"forward": 0, "reverse": 1, "random": 2}
ERROR_BYTES = 1024

QUERY_VIEWS, KEY_VIEWS = ("query", "out", "dout", "dquery"), ("key", "value", "dkey", "dvalue")
GIVEN = ("query", "key", "value", "dout", "mask", "tiles", "branches", "starts", "tile_ends", "places")

_ALONE = threading.Lock()
"""Held by a launch: a library computes one block at a time."""

Span = tuple[int, int, str, bool]


class Range(ctypes.Structure):
    """`Range` of `tests/backends/cuda/host/block.h`."""

    _fields_ = [("low", ctypes.c_size_t), ("bytes", ctypes.c_int64), ("name", ctypes.c_char_p), ("constant", ctypes.c_int64)]


class CodePlace(ctypes.Structure):
    """`CodePlace` of `tests/backends/cuda/host/block.h`."""

    _fields_ = [("site", ctypes.c_uint32), ("bytes", ctypes.c_uint32), ("accesses", ctypes.c_int64), ("turns", ctypes.c_int64)]


MAX_PLACES = 512


class Launch(ctypes.Structure):
    """`Launch` of `tests/backends/cuda/host/block.h`."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("blocks", "first_block", "block_step", "order")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("shared_bytes", "range_count", "array_count")),
        *((name, ctypes.POINTER(Range)) for name in ("ranges", "arrays")),
        ("error", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("matrices", "conflicts", "barriers")),
    ]


class KernelError(RuntimeError):
    """A kernel did what a GPU does not allow, or does not promise."""


class HostLauncher:
    """Runs the threads of a block in `order` ("forward", "reverse", or "random" by `seed`), and blocks on `workers` cores.

    `matrices`: loaded matrices; `conflicts`: their turns beyond one each; `barriers`: meetings of all threads of a block.
    `checked`: checks bounds of arrays in shared memory and races at every access; ten times slower.
    `turns`: then, by place in the code and bytes of a lane, instructions that touched shared memory, and their turns beyond the
    least.
    """

    def __init__(self, order: str = "forward", seed: int = 0, workers: int | None = None, checked: bool = False):
        self.order, self.seed, self.checked = ORDERS[order], seed, checked
        self.matrices = self.conflicts = self.barriers = 0
        self._turns: dict[Path, dict[tuple[int, int], tuple[int, int]]] = {}
        self._counter = np.zeros(2, np.int32)
        self.workers = workers or min(4, len(os.sched_getaffinity(0)))

    def resident(self, kernel, device=None) -> int:
        """Two blocks a worker, so that both the first tile of a block and later ones are met."""
        return 2 * self.workers

    at_least_resident = resident

    def counter(self, device=None) -> int:
        """The same for all launches: each waits for its end."""
        return int(self._counter.ctypes.data)

    def launch(self, kernel, blocks: int, arguments, device=None, memory: Mapping[str, Any] | None = None):
        """Run `blocks` blocks of `kernel`: its `source`, `name`, `macros` and `shared_bytes`. Waits for them.

        The kernel may touch `memory` (contiguous arrays or tensors by name), or the memory that `arguments` point to.
        Raises KernelError with kernel, block, thread and place for whatever is caught.
        """
        arguments = np.array(arguments)
        built = kernel.source, tuple(kernel.macros.items()), self.checked
        path = host_compile.compile_kernel(*built)
        spans = argument_spans(arguments[()], 2 if kernel.macros["STORAGE"] else 4) if memory is None else [*_spans(memory)]
        spans += [] if memory is not None else bias_spans(arguments[()], kernel.macros, blocks)
        spans += step_spans(arguments[()], kernel.macros) if memory is None and arguments["step"]["memory"] else []
        ranges, arrays = _ranges(spans), _ranges((*x, False) for x in host_compile.arrays(path))
        count = min(self.workers, blocks)
        error = [ctypes.create_string_buffer(ERROR_BYTES) for _ in range(count)]
        places = [(CodePlace * MAX_PLACES)() for _ in range(count)]
        sizes = kernel.shared_bytes, len(ranges), len(arrays), ranges, arrays
        written = [(ctypes.addressof(error[i]), ctypes.addressof(places[i])) for i in range(count)]
        parts = [Launch(blocks, i, count, self.order, self.seed + i, *sizes, *written[i]) for i in range(count)]
        functions = [getattr(host_compile.library(*built, i), f"host_launch_{kernel.name}") for i in range(count)]
        with _ALONE, ThreadPoolExecutor(count) as pool:
            for _ in pool.map(lambda f, part: f(ctypes.c_void_p(arguments.ctypes.data), ctypes.byref(part)), functions, parts):
                pass
        self.matrices += sum(part.matrices for part in parts)
        self.conflicts += sum(part.conflicts for part in parts)
        self.barriers += sum(part.barriers for part in parts)
        self._add_turns(path, [place for own in places for place in own if place.accesses])
        for text in error:
            if text.value:
                raise KernelError(host_compile.with_lines(text.value.decode(), path))
        if memory is None and arguments["counter"] and (left := _counted(arguments)):
            raise KernelError(f"{kernel.name}: it leaves its counter at {left}")

    def _add_turns(self, path: Path, places: Iterable[CodePlace]):
        known = self._turns.setdefault(path, {})
        for place in places:
            _add(known, (place.site, place.bytes), place.accesses, place.turns)

    @property
    def turns(self) -> dict[tuple[str, int], tuple[int, int]]:
        found: dict[tuple[str, int], tuple[int, int]] = {}
        for path, known in self._turns.items():  # a library at a time: to look places up one by one takes longer than the kernels
            lines = host_compile.lines({site for site, _ in known}, path)
            for (site, size), counts in known.items():
                _add(found, (lines[site], size), *counts)
        return found


def _add(known: dict[Any, tuple[int, int]], key, accesses: int, turns: int):
    before = known.get(key, (0, 0))
    known[key] = before[0] + accesses, before[1] + turns


def _ranges(spans: Iterable[Span]):
    found = [Range(address, size, name.encode(), constant) for address, size, name, constant in spans]
    return (Range * len(found))(*found)


def _spans(memory: Mapping[str, Any]) -> Iterator[Span]:
    for name, x in memory.items():
        if isinstance(x, np.ndarray):
            yield x.ctypes.data, x.nbytes, name, not x.flags.writeable
        else:
            yield x.data_ptr(), x.nbytes, name, False


def argument_spans(arguments, itemsize: int) -> list[Span]:
    """The memory that the arguments of a launch point to; what a kernel may not write is constant."""
    batch, seq, heads, kv_heads, dim = (int(arguments[name]) for name in ("batch", "seq", "heads", "kv_heads", "head_dim"))
    sequences = 0
    if arguments["starts"]:  # sequences of one tensor
        batch, sequences = 1, batch
    found: list[Span] = []
    for own, views in ((heads, QUERY_VIEWS), (kv_heads, KEY_VIEWS)):
        for name in views:
            data, *strides = (int(x) for x in arguments[name])
            last = sum((n - 1) * stride for n, stride in zip((batch, seq, own), strides, strict=True))
            found.append((data, (last + dim) * itemsize, name, name in GIVEN))
    mask_bytes = (batch - 1) * int(arguments["mask_batch"]) + (seq - 1) * int(arguments["mask_row"]) + 1
    rows = batch * heads * seq * 4
    sizes = dict(
        lse=rows,
        delta=rows,
        mask=mask_bytes,
        tiles=arguments["tile_count"] * 16,
        branches=branch_records(int(arguments["branches"]), abs(int(arguments["branch_count"]))) * BRANCH.itemsize,
        counter=8 if arguments["step"]["splits"] else 4,
        starts=(sequences + 1) * 4,
        tile_ends=sequences * 4,
        places=batch * 40,
    )
    found += [(int(arguments[name]), int(size), name, name in GIVEN) for name, size in sizes.items()]
    return [span for span in found if span[0] and span[1] > 0]


def bias_spans(arguments, macros: Mapping[str, int], blocks: int) -> list[Span]:
    seq, heads, entries = (int(arguments[name]) for name in ("seq", "heads", "entries"))
    batch = 1 if arguments["starts"] else int(arguments["batch"])
    tokens = int(arguments["step"]["tokens"]) or seq
    positions = (batch - 1) * int(arguments["positions_batch"]) + tokens * macros.get("DIMS", 1)
    sizes = dict(bias_weights=heads * entries, positions=positions, bias_parts=blocks * entries * (macros["THREADS"] + heads))
    spans = [(int(arguments[name]), 4 * size, name, name != "bias_parts") for name, size in sizes.items()]
    return [span for span in spans if span[0]]


def _counted(arguments) -> int:
    number = ctypes.c_int64 if arguments["step"]["splits"] else ctypes.c_int32
    return int(number.from_address(int(arguments["counter"])).value)


def step_spans(arguments, macros: Mapping[str, int]) -> list[Span]:
    step, heads, kv_heads, group = arguments["step"], int(arguments["heads"]), int(arguments["kv_heads"]), macros["GROUP"]
    merges = int(arguments["batch"]) * int(arguments["seq"]) * kv_heads * -(-heads // kv_heads // group)
    partials = merges * int(step["splits"]) * group * (macros["HEAD_DIM"] + 2) * 4
    stored, positions, unseen = (int(step[name]) for name in ("stored_count", "positions_count", "unseen_count"))
    lines, sizes = stored + positions + unseen, (("spans", len(StepSpan._fields)), ("writes", len(Write._fields)))
    found = [(int(step[name]), 8 * size * int(step[f"{name[:-1]}_count"]), name, True) for name, size in sizes]
    found += [(int(step["pages"]), 8 * int(step["page_count"]), "pages", True), (int(step["memory"]), 40 * lines, "memory", True)]
    found += [(int(step["partials"]), partials, "partials", False), (int(step["sink"]), 4 * heads, "sink", True)]
    memory = np.frombuffer(ctypes.string_at(int(step["memory"]), 40 * lines), np.int64).reshape(lines, 5).tolist()
    element = {3: 1, 0: 4}.get(macros["STORED"], 2)
    for number, (address, reach, *_) in enumerate(memory):
        size = element if number < stored else 8 if number < stored + positions else 1
        found.append((address, reach * size, f"tensor {number} of the step", number >= stored))
    return [span for span in found if span[0] and span[1] > 0]


def branch_records(address: int, count: int) -> int:
    """Count the records: branches, or the parts of a relation and their runs."""
    if not count:
        return 0
    branches = np.frombuffer(ctypes.string_at(address, count * BRANCH.itemsize), BRANCH)
    return count - int(np.minimum(branches["rate"], 0).sum())
