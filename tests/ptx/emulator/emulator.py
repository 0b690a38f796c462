"""Launches of PTX kernels on the CPU: the emulator, its options and its counts."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ptx.emulator.library import Launch, Range, is_known, library_of
from ptx.emulator.parse import Entry, entry_of

Span = tuple[int, int, str, bool]
"""Memory that a launch may touch: address, bytes, name, and True if it is only read."""

ERROR_BYTES = 1024
WAYS_OF_COPIES = 3
"""Values of `late` in machine/memory.h: each launch takes the next."""
WARP, MOST_THREADS = 32, 1024
SHOWN = 60
"""Characters of a kernel's name in a message, counted from its end."""
ASYNCHRONOUS = re.compile(r"(?<![\w.])(wgmma|mbarrier|cp(?:\.reduce)?\.async\.bulk|tcgen05)\.[\w.:]+")
"""Instructions of several warps together, and copies by a unit of their own. Few have a model."""


class PTXError(RuntimeError):
    """A kernel did something that the PTX ISA does not allow, or does not promise."""


class NotModelled(PTXError):
    """A kernel uses instructions that the emulator has no model of."""


@dataclass(frozen=True)
class Rounding:
    """Rounding of products of matrices and of powers of two.

    Products of halves are exact. Those of a group, and the sum so far, are cut off to some bits after the leading place of the
    largest, added exactly, and the sum is cut off to fp32, towards zero: Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of
    NVIDIA tensor cores", PeerJ Computer Science 7:e330 (2021), of V100, T4 and A100. Sizes of groups, and numbers of bits: Xie,
    Wang, Yang, Yang, "MMA-Sim: bit-accurate reference model of tensor cores and matrix cores", arXiv:2511.10909 (2025), of Turing
    to Blackwell, whose code (github.com/microsoft/MMA-Sim) has the numbers below.

    Attributes:
        group: Products that are added at a time; 0: an instruction rounds once.
        fraction: Bits that are left of each.
        ulps: Units of the last place by which powers of two are off at most.
    """

    group: int = 0
    fraction: int = 0
    ulps: int = 0


ONCE = Rounding()
POWERS = 2
"""Units that `ex2.approx.ftz.f32` may be off, over all numbers (PTX ISA, Floating Point Instructions: ex2)."""
MEASURED = {(9, 0): Rounding(16, 25, POWERS), (8, 0): Rounding(8, 24, POWERS), (7, 5): Rounding(8, 24, POWERS)}
"""Rounding from a compute capability on. Turing's instruction has one group of 8, Ampere's two."""


def measured(capability: tuple[int, int]) -> Rounding:
    """Return the rounding of a device, which is that of the newest measured one before it."""
    return next((rounding for since, rounding in MEASURED.items() if capability >= since), Rounding(ulps=POWERS))


@dataclass(frozen=True)
class Options:
    """Options of an emulator.

    Attributes:
        seed: Seed of the order in which warps run.
        checked: True if races, and copies that nobody waits for, are errors.
        counted: True if issued instructions are counted.
        rounding: Rounding of products of matrices and of powers of two.
        resident: Number of blocks at once.
        loops: Turns of loops, over all threads, after which a launch is taken to run for ever.
        change: Function that changes PTX before it is compiled, such as one that puts a fault into it.
    """

    seed: int = 0
    checked: bool = True
    counted: bool = False
    rounding: Rounding = ONCE
    resident: int = 3
    loops: int = 20_000_000
    change: Callable[[str], str] = str


@dataclass(frozen=True)
class Counts:
    """Numbers of issued instructions, summed over blocks and launches, in the order of machine/thread.h.

    By warps: `products_k8` and `products_k16`, of (16, 8) sums and so deep; `matrices` that are loaded for them, and the
    wavefronts that takes, one each without conflicts of banks; `shared_instructions`, loads and stores of shared memory, the
    wavefronts they take, and how many at least, if no bank gives a word twice; `shuffles`, votes and reductions; `warp_barriers`.
    By blocks: `barriers`. By threads: `fma`; `fp32`, other sums and products in fp32; `special`, powers of 2, reciprocals and
    quotients; `atomics`. In bytes: `global_loaded`, `global_stored`, and `copied` to shared memory asynchronously.
    """

    products_k8: int = 0
    products_k16: int = 0
    matrices: int = 0
    matrix_wavefronts: int = 0
    shared_instructions: int = 0
    shared_wavefronts: int = 0
    shared_least_wavefronts: int = 0
    global_loaded: int = 0
    global_stored: int = 0
    copied: int = 0
    fma: int = 0
    fp32: int = 0
    special: int = 0
    shuffles: int = 0
    warp_barriers: int = 0
    barriers: int = 0
    atomics: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name in FIELDS))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) - getattr(other, name) for name in FIELDS))

    def times(self, factor: int) -> Counts:
        return Counts(*(getattr(self, name) * factor for name in FIELDS))


FIELDS = tuple(Counts.__dataclass_fields__)


class Emulator:
    """A GPU that executes PTX on the CPU, one launch after the other.

    Args:
        options: Options of all launches.

    Attributes:
        counts: Issued instructions by kernel name; zeros unless `options.counted`.
        launches: Number of launches by kernel name.
        not_modelled: Message of the last `NotModelled`, or "".

    Example:
        >>> import numpy as np
        >>> from ptx.emulator import Emulator
        >>> doubled = '''
        ... .version 8.0
        ... .target sm_80
        ... .address_size 64
        ... .visible .entry doubled(.param .u64 numbers)
        ... {
        ...     .reg .b32 %r<3>;
        ...     .reg .b64 %rd<4>;
        ...     ld.param.u64 %rd1, [numbers];
        ...     mov.u32 %r1, %tid.x;
        ...     mul.wide.u32 %rd2, %r1, 4;
        ...     add.s64 %rd3, %rd1, %rd2;
        ...     ld.global.u32 %r2, [%rd3];
        ...     add.s32 %r2, %r2, %r2;
        ...     st.global.u32 [%rd3], %r2;
        ...     ret;
        ... }
        ... '''
        >>> numbers = np.arange(32, dtype=np.uint32)
        >>> Emulator().launch(doubled, [numbers], blocks=1, threads=32)
        >>> numbers[:6].tolist()
        [0, 2, 4, 6, 8, 10]
    """

    def __init__(self, options: Options | None = None) -> None:
        self.options, self.not_modelled = options or Options(), ""
        self.counts: dict[str, Counts] = {}
        self.launches = Counter[str]()
        self._kernels: dict[str, tuple[Entry, ctypes.CDLL]] = {}

    def launch(
        self,
        ptx: str,
        arguments: Sequence[Any],
        *,
        blocks: int,
        threads: int | tuple[int, int],
        shared_bytes: int = 0,
        memory: Iterable[Span] = (),
        resident: int = 0,
        numbers: Sequence[int] = (),
    ) -> None:
        """Execute a kernel and wait for its end.

        Args:
            ptx: PTX of one kernel.
            arguments: Values of all parameters: bytes, numpy scalars, or contiguous arrays, whose addresses are passed.
            blocks: Number of blocks in the grid.
            threads: Threads of a block, in x or in (x, y); a multiple of 32 up to 1024 in all.
            shared_bytes: Dynamic shared memory of a block.
            memory: Further memory that the kernel may touch. Races in a span named "counter" are no errors.
            resident: Number of blocks at once, in place of that of the options.
            numbers: Numbers of the only blocks that run; all do by default.

        Raises:
            UnknownPTX: The PTX has something that the emulator does not know.
            NotModelled: It has instructions that the emulator has no model of.
            PTXError: The kernel is wrong; the message names the block, the thread and the line of the PTX.
            ValueError: Arguments do not fit the parameters, or threads are no block of whole warps.
        """
        across, down = threads if isinstance(threads, tuple) else (threads, 1)
        if across * down not in range(WARP, MOST_THREADS + 1, WARP):
            raise ValueError(f"threads={threads}: give a multiple of {WARP} up to {MOST_THREADS} in all")
        entry, library = self._kernel(ptx)
        parameters, spans = packed(entry, arguments), [*spans_of(arguments), *memory]
        ranges = (Range * len(spans))(*(Range(low, size, name.encode(), constant) for low, size, name, constant in spans))
        error, counts = ctypes.create_string_buffer(ERROR_BYTES), (ctypes.c_int64 * len(FIELDS))()
        number, options, running = self.launches.total(), self.options, len(numbers) or blocks
        self.launches[entry.name] += 1
        launch = Launch(
            blocks=running,
            threads=across * down,
            across=across,
            resident=min(running, resident or options.resident),
            checked=options.checked,
            late=number % WAYS_OF_COPIES,
            group=options.rounding.group,
            fraction=options.rounding.fraction,
            ulps=options.rounding.ulps,
            range_count=len(spans),
            seed=options.seed * 1_000_003 + number,
            dynamic_bytes=shared_bytes,
            loops=options.loops,
            ranges=ranges,
            error=ctypes.addressof(error),
            counts=counts,
            numbers=(ctypes.c_int32 * len(numbers))(*numbers) if numbers else None,
            grid=blocks,
        )
        if library.ptx_launch(ctypes.create_string_buffer(parameters, len(parameters)), ctypes.byref(launch)):
            raise PTXError(f"{entry.name[-SHOWN:]} for {entry.target}: {error.value.decode()}")
        self.counts[entry.name] = self.counts.get(entry.name, Counts()) + Counts(*counts)

    def _kernel(self, ptx: str) -> tuple[Entry, ctypes.CDLL]:
        """Return the head of a kernel and its compiled library."""
        if ptx not in self._kernels:
            entry = entry_of(ptx)
            for opcode, family in {found[0]: found[1] for found in ASYNCHRONOUS.finditer(ptx)}.items():
                if not is_known(opcode):
                    self.not_modelled = f"{entry.name} for {entry.target} has {family}, which the emulator does not model"
                    raise NotModelled(self.not_modelled)
            self._kernels[ptx] = entry, library_of(self.options.change(ptx), self.options.counted)
        return self._kernels[ptx]


def packed(entry: Entry, arguments: Sequence[Any]) -> bytes:
    """Return the bytes of all parameters, each at its place. Raises ValueError."""
    if len(arguments) != len(entry.parameters):
        raise ValueError(f"{entry.name} has {len(entry.parameters)} parameters: {len(arguments)} arguments were given")
    data = bytearray()
    for parameter, argument in zip(entry.parameters, arguments, strict=True):
        value = argument if isinstance(argument, bytes) else _bytes_of(argument)
        if len(value) != parameter.bytes:
            raise ValueError(f"{entry.name}: {parameter.name} has {parameter.bytes} bytes, and its argument {len(value)}")
        data += bytes(parameter.offset - len(data)) + value
    return bytes(data)


def _bytes_of(argument: np.ndarray[Any, Any] | np.generic) -> bytes:
    if isinstance(argument, np.ndarray) and not argument.flags.c_contiguous:
        raise ValueError(f"an array of strides {argument.strides} is not contiguous: give a copy")
    return (np.uint64(argument.ctypes.data) if isinstance(argument, np.ndarray) else argument).tobytes()


def spans_of(arguments: Sequence[Any]) -> list[Span]:
    """Return the memory of the arrays; one that is not writeable is only read."""
    return [
        (array.ctypes.data, array.nbytes, f"argument {number}", not array.flags.writeable)
        for number, array in enumerate(arguments)
        if isinstance(array, np.ndarray)
    ]
