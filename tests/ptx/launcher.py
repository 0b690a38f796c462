"""Launches PTX on the CPU: a launcher for tests, in the place of CuPy's."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from helpers.host_launcher import Span, argument_spans, bias_spans, step_spans
from ptx.counts import FIELDS, Counts
from ptx.library import Launch, Library, Range, library_of
from ptx.rounding import ONCE, Rounding
from ptx.source import ptx_of

from dilkit.backends.cuda.backend import CupyRaw
from dilkit.backends.cuda.table import CudaKernel
from dilkit.device import Capability

ERROR_BYTES = 1024
WAYS_OF_COPIES = 3
"""`late` of machine/copies.h: each launch takes the next."""


class PTXError(RuntimeError):
    """A kernel did what the PTX ISA does not allow, or does not promise."""


@dataclass(frozen=True)
class Options:
    """`seed` of the order of warps. `checked`: races, and copies that nobody waits for, are errors. `counted`: what is issued is
    counted. `resident` blocks at once. After so many turns of `loops` a launch is taken to run for ever. `change`: what is done
    to the PTX before."""

    seed: int = 0
    checked: bool = True
    counted: bool = False
    rounding: Rounding = ONCE
    resident: int = 3
    loops: int = 20_000_000
    change: Callable[[str], str] = str


@dataclass(frozen=True)
class Sizes:
    """`across`: threads of a block in the direction of x. `resident` blocks at once, in the order of their numbers, but for one
    that begins last. With `numbers`, only these of the `blocks` run."""

    blocks: int
    threads: int
    across: int
    resident: int
    dynamic_bytes: int
    numbers: tuple[int, ...] = ()


def execute(library: Library, parameters: bytes, sizes: Sizes, spans: list[Span], options: Options, number: int) -> Counts:
    """What a launch, the `number`-th of several, issues. Raises PTXError for whatever is caught, with the place in the PTX."""
    ranges = (Range * len(spans))(*(Range(at, size, name.encode(), constant) for at, size, name, constant in spans))
    error, counts = ctypes.create_string_buffer(ERROR_BYTES), (ctypes.c_int64 * len(FIELDS))()
    rounding, given = options.rounding, ctypes.create_string_buffer(parameters, len(parameters))
    blocks = len(sizes.numbers) or sizes.blocks
    grid = blocks, sizes.threads, sizes.across, min(blocks, sizes.resident)
    which = (ctypes.c_int32 * len(sizes.numbers))(*sizes.numbers) if sizes.numbers else None, sizes.blocks
    ways = options.checked, number % WAYS_OF_COPIES, rounding.group, rounding.fraction, rounding.ulps
    seed = options.seed * 1_000_003 + number
    limits = sizes.dynamic_bytes, options.loops
    launch = Launch(*grid, *ways, len(spans), seed, *limits, ranges, ctypes.addressof(error), counts, *which)
    if library.launch(ctypes.addressof(given), launch):
        raise PTXError(error.value.decode())
    return Counts(*counts)


class PTXLauncher:
    """Runs kernels for devices of `capability`. `counts`: by kernel name, what all launches have issued so far, if counted."""

    def __init__(self, capability: Capability, options: Options) -> None:
        self.capability, self.options = capability, options
        self.counts: dict[str, Counts] = {}
        self.launches = Counter[str]()
        self._libraries: dict[CudaKernel, Library] = {}
        self._counter = np.zeros(2, np.int32)

    def resident(self, kernel: CudaKernel, device: object = None) -> int:
        return self.options.resident

    at_least_resident = resident

    def counter(self, device: object = None) -> int:
        return int(self._counter.ctypes.data)

    def text(self, kernel: CudaKernel) -> str:
        """The PTX that is run."""
        return self.options.change(ptx_of(kernel, self.capability))

    def launch(self, kernel: CudaKernel, blocks: int, arguments: Any, device: object = None) -> None:
        """Run `blocks` blocks of `kernel`, all at once. Raises PTXError for whatever is caught, with the place in the PTX."""
        self.run(kernel, (), blocks, arguments)

    def run(self, kernel: CudaKernel, numbers: tuple[int, ...], grid: int, arguments: Any) -> None:
        """The same of the blocks of these `numbers` alone, of a launch of `grid` blocks."""
        arguments, spans = np.array(arguments), spans_of(kernel, grid, np.array(arguments))
        sizes = Sizes(grid, kernel.threads, kernel.threads, grid, kernel.shared_bytes, numbers)
        number = self.launches.total()
        self.launches[kernel.name] += 1
        try:
            counts = execute(self._library(kernel), arguments.tobytes(), sizes, spans, self.options, number)
        except PTXError as error:
            raise PTXError(f"{kernel.name} {kernel.macros} {self.capability}: {error}") from None
        if arguments["counter"] and self._counter.any():
            raise PTXError(f"{kernel.name}: it leaves its counter at {self._counter}")
        self.counts[kernel.name] = self.counts.get(kernel.name, Counts()) + counts

    def _library(self, kernel: CudaKernel) -> Library:
        if kernel not in self._libraries:
            self._libraries[kernel] = library_of(self.text(kernel), self.options.counted)
        return self._libraries[kernel]


def spans_of(kernel: CudaKernel, blocks: int, arguments: Any) -> list[Span]:
    """The memory that a launch may touch."""
    given = arguments[()]
    step = step_spans(given, kernel.macros) if given["step"]["memory"] else []
    return [*argument_spans(given, 2 if kernel.macros["STORAGE"] else 4), *bias_spans(given, kernel.macros, blocks), *step]


class OnPTX(CupyRaw):
    """The backend as it is, but for the device: the CPU, which runs the PTX for a device of `capability`."""

    requires = ("torch",)
    limits = replace(CupyRaw.limits, devices=frozenset({"cpu"}), min_capability=None)
    priority = -100

    def __init__(self, capability: Capability, options: Options | None = None) -> None:
        self.own = PTXLauncher(capability, options or Options())
        super().__init__(self.own, capability)
        self.name = "PTX on sm_{}{}".format(*capability)  # type: ignore[misc]
