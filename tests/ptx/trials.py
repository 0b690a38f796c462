"""Trials of the kernels' PTX for each backend and kind of GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Any

import torch
from helpers.on_host import OnHost
from helpers.pairwise import every_pair
from helpers.steps import GPU_BIASES, GPU_DTYPES, GPU_LIMITS, GPU_SHAPES, StepCase, expected, gpu_case, in_pages, make_step
from ptx.cuda_runs import DROPPED, KINDS, LISTED, PATTERNS, SCORED, SIZES
from ptx.emulator import MEASURED, Emulator, Options, PTXError, UnknownPTX, measured

from dilkit import Pattern, register_backend, unregister_backend
from dilkit.backend import missing_modules
from dilkit.backends.cuda.hopper import CAPABILITY as HOPPER, HEAD_DIMS as HOPPER_DIMS, hopper_kernel
from dilkit.backends.numba.backend import TABLE
from dilkit.backends.tiles.backend import StepBackend, TiledBackend
from dilkit.backends.triton.sizes import HEAD_DIMS
from dilkit.device import Capability
from dilkit.testing.conformance import check
from dilkit.testing.problems import OTHER_KINDS, PROBLEMS, SCORES, Case

MODULES = {
    "cupy_raw": ("cupy",),
    "hopper": ("cupy",),
    "triton": ("triton",),
    "numba_cuda": ("numba_cuda", "nvidia.cuda_nvcc", "nvidia.cuda_nvrtc"),
}
"""Modules that compile the kernels of each backend."""
CAPABILITIES: tuple[Capability, ...] = (7, 5), (8, 0), (9, 0), (10, 0), (12, 0)
AMPERE: Capability = (8, 0)
OTHERS: dict[str, Capability] = {"triton": (9, 0), "numba_cuda": (5, 2)}
"""Another device for each backend in Python: the first with `wgmma` for Triton, the oldest for numba."""
DTYPES = {"triton": ("float32", "float16", "bfloat16"), "numba_cuda": ("float32", "float16")}
STEP_BLOCKS = 5
"""Blocks of a step at once, so that several compute the pieces and merges of a row."""
WAITING = 25
"""Factor to the turns of loops that a step may take, as its blocks wait for one another in loops."""

MANY_SPANS = replace(gpu_case(("float32", ""), "many", ""), spans=300, most=6)
"""A step of more spans, and of more writes, than a block has threads."""


@dataclass(frozen=True)
class Trial:
    """Case of a list for one backend, on a device of `capability`; `rounded` as devices are measured to round."""

    listed: str
    capability: Capability
    case: Case | StepCase
    rounded: bool = False
    backend: str = "cupy_raw"

    @property
    def architecture(self) -> str:
        return "sm_{}{}".format(*self.capability)

    @property
    def case_name(self) -> str:
        return self.case.name if isinstance(self.case, Case) else str(self.case)

    @property
    def name(self) -> str:
        return f"{self.backend} {self.listed} {self.architecture}{' rounded' * self.rounded} {self.case_name}"


@dataclass(frozen=True)
class Outcome:
    """Result of a trial.

    Attributes:
        reason: Fault, or "" where the trial passed or was skipped.
        worst: Largest error in units of plain torch math's error, of which 2 are right, and 3 for gradients; for a step, in
            units of its limit.
        seconds: CPU time, of compilers too.
        skipped: Reason why the trial was not run, or "".
        launches: Number of launches that were run.
    """

    trial: Trial
    seed: int
    reason: str
    worst: float
    seconds: float
    skipped: str = ""
    launches: int = 0


def every_trial() -> list[Trial]:
    in_cuda = dict.fromkeys((*sizes(), *rounded(), *features(), *steps()))
    on_hopper = dict.fromkeys((*HOPPER_SMALL, *listed_of_hopper()))
    in_python = *sizes_of("triton"), *sizes_of("numba_cuda"), *steps_of_triton(), *listed_of("triton"), *listed_of("numba_cuda")
    return [*in_cuda, *on_hopper, *in_python]


def sizes() -> Iterator[Trial]:
    for capability, case in product(CAPABILITIES, dict.fromkeys(case for _, case in SIZES)):
        if case.dtype != "bfloat16" or capability >= (8, 0):
            yield Trial("sizes", capability, case)


def features() -> Iterator[Trial]:
    """Yield problems, other kinds of patterns, dropped weights, changed scores: each case on one kind of device, in turn."""
    listed = {"list": LISTED, "kinds": of(KINDS[0] + KINDS[1]), "dropped": of(DROPPED), "scores": of(SCORED)}
    for name, cases in listed.items():
        for at, case in enumerate(cases):
            capability = CAPABILITIES[at % len(CAPABILITIES)]
            if not OnHost(capability).refusals(case.problem()):
                yield Trial(name, capability, case, rounded=at % 2 == 1)


def of(runs: list[tuple[Capability, Case]]) -> list[Case]:
    return list(dict.fromkeys(case for _, case in runs))


def steps() -> Iterator[Trial]:
    for at, case in enumerate(step_cases()):
        yield Trial("steps", CAPABILITIES[at % len(CAPABILITIES)], case, rounded=at % 2 == 1)
    yield from (Trial("steps", capability, MANY_SPANS) for capability in CAPABILITIES)


def rounded() -> Iterator[Trial]:
    """Yield every size and the whole problem list on each kind of device whose rounding has been measured, with that."""
    yield from (replace(trial, rounded=True) for trial in sizes() if trial.capability in MEASURED)
    for capability, case in product(MEASURED, LISTED):
        if not OnHost(capability).refusals(case.problem()):
            yield Trial("list", capability, case, rounded=True)


def step_cases() -> list[StepCase]:
    rows = [row.values for row in every_pair(GPU_DTYPES, GPU_SHAPES, GPU_BIASES) if not row.marks]
    return [replace(gpu_case(*row), seed=at) for at, row in enumerate(rows)]


def sizes_of(backend: str) -> Iterator[Trial]:
    """Yield rows and columns of more than one tile, causal and masked, for each head_dim that kernels in Python have."""
    numbers = HEAD_DIMS if backend == "triton" else sorted({tiling.head_dim for row in TABLE.values() for tiling in row})
    fields: dict[str, Any] = dict(pattern=Pattern([128, 150, 150], [1, 2, 32]), seq=150, heads=2, kv_heads=1, batch=1)
    for capability, number, dtype in product((AMPERE, OTHERS[backend]), numbers, DTYPES[backend]):
        case = Case(feature="sizes", variant=str(number), head_dim=number - 1, dtype=dtype, is_causal=True, **fields)
        yield Trial("sizes", capability, replace(case, mask="random"), backend=backend)


def listed_of(backend: str) -> Iterator[Trial]:
    """Yield the problem list; for Triton also other kinds of patterns and changed scores."""
    cases = PROBLEMS if backend == "numba_cuda" else (*PROBLEMS, *OTHER_KINDS, *SCORES)
    for case in cases:
        if case.dtype in DTYPES[backend] and not case.rows and not case.lengths:
            yield Trial("list", AMPERE, case, backend=backend)


def listed_of_hopper() -> Iterator[Trial]:
    """Yield the forward passes of the problem list that the kernel for Hopper serves, with its head_dims, in turn."""
    dims = cycle(product((*HOPPER_DIMS, HOPPER_DIMS[0] - 8, HOPPER_DIMS[1] - 24), ("bfloat16", "float16")))
    for case in dict.fromkeys(replace(case, dtype="", head_dim=0, gradients=False) for case in PROBLEMS):
        head_dim, dtype = next(dims)
        case = replace(case, variant=f"{case.variant} {head_dim}", head_dim=head_dim, dtype=dtype)
        if case.layout != "sliced" and not case.lengths and hopper_kernel(case.problem(), HOPPER, True):
            yield Trial("list", HOPPER, case, rounded=head_dim in HOPPER_DIMS, backend="hopper")


def steps_of_triton() -> Iterator[Trial]:
    for at, case in enumerate(step_cases()):
        yield Trial("steps", OTHERS["triton"] if at % 4 == 3 else AMPERE, case, backend="triton")
    yield from (Trial("steps", capability, MANY_SPANS, backend="triton") for capability in (AMPERE, OTHERS["triton"]))


def small(head_dim: int, dtype: str) -> tuple[Trial, ...]:
    """Return cases over several groups, over full tiles, packed, and with rows that no head keeps.

    What the mask ignores, and whole sequences, are NaN: so is the first row, which is read where nothing should be.
    """
    fields: dict[str, Any] = dict(variant=str(head_dim), batch=1, heads=2, kv_heads=1, head_dim=head_dim, dtype=dtype)
    (groups, seq), (tall, long) = PATTERNS.values()
    masked: dict[str, Any] = dict(mask="left", values="ignored NaN")
    cases = (
        Case(feature="groups", pattern=groups, seq=seq, is_causal=True, **masked, **fields),
        Case(feature="tall", pattern=tall, seq=long, **masked, **fields),
        Case(feature="packed", pattern=groups, seq=seq, lengths=(70, 150, 80), is_causal=True, poisoned=True, **fields),
        Case(feature="kept by none", pattern=Pattern([60, 90], [3, 5]), seq=100, **fields),
    )
    return tuple(Trial("small", (8, 0), case) for case in cases)


TENSOR, PAIRS, SINGLE = small(32, "bfloat16"), small(128, "bfloat16"), small(32, "float32")
SKIPPED = Case(feature="skipped", variant="", pattern=Pattern([512, 1024], [1, 4]), seq=1000, head_dim=64, dtype="bfloat16")
"""A pattern in which half of the rows of a tile see fewer key tiles than the other half."""
HOPPER_SMALL = tuple(
    Trial("small", HOPPER, replace(case, gradients=False), backend="hopper")
    for case in (
        *(trial.case for trial in (*small(64, "bfloat16"), *small(128, "float16"))),
        replace(SKIPPED, batch=1, heads=1, is_causal=True),
    )
    if isinstance(case, Case) and not case.lengths
)
STEP = tuple(Trial("steps", (8, 0), case) for case in (gpu_case(("float32", ""), "grouped", "coordinates"), MANY_SPANS))
"""Cases of all kernels between them."""


def run(trial: Trial, seed: int, options: Options | None = None) -> Outcome:
    """Run a trial by itself: its launches have the same orders of warps wherever it is repeated."""
    start = cpu_seconds()
    options = replace(options or Options(), seed=seed)
    if isinstance(trial.case, StepCase):
        options = replace(options, resident=STEP_BLOCKS, loops=WAITING * options.loops)
    if trial.rounded:
        options = replace(options, rounding=measured(trial.capability))
    with opened(trial.backend, trial.capability, options) as (backend, emulator):
        try:
            reason, worst = (_run_case if isinstance(trial.case, Case) else _run_step)(trial, backend)
        except (PTXError, UnknownPTX) as error:
            reason, worst = str(error), float("nan")
    skipped = emulator.not_modelled or reason * reason.startswith("refused")
    launches = emulator.launches.total()
    return Outcome(trial, seed, "" if skipped else reason, worst, cpu_seconds() - start, skipped, launches)


@contextmanager
def opened(name: str, capability: Capability, options: Options) -> Iterator[tuple[TiledBackend, Emulator]]:
    """Yield a backend for tensors of the CPU, as on devices of `capability`, and the emulator that it launches on.

    Only its own compiler is imported, for others may not be installed.
    """
    if name in ("cupy_raw", "hopper"):
        from ptx.launches.from_cuda import CudaOnPTX, PTXLauncher

        launcher = PTXLauncher(capability, options)
        yield CudaOnPTX(launcher, name == "hopper"), launcher.emulator
        return
    if name == "triton":
        from ptx.launches.from_triton import opened as opened_there
    else:
        from ptx.launches.from_numba import opened as opened_there
    with opened_there(capability, emulator := Emulator(options)) as backend:
        yield backend, emulator


def is_installed(name: str) -> bool:
    return not missing_modules(MODULES[name])


def cpu_seconds() -> float:
    return sum(os.times()[:4])


def _run_case(trial: Trial, backend: TiledBackend) -> tuple[str, float]:
    assert isinstance(trial.case, Case)
    register_backend(backend)
    try:
        result = check(backend.name, trial.case)
    finally:
        unregister_backend(backend.name)
    return "" if result.verdict == "passed" else f"{result.verdict}: {'; '.join(result.reasons)}", result.worst


def _run_step(trial: Trial, backend: TiledBackend) -> tuple[str, float]:
    """Run a step as it is, where no row begins at a multiple of 16 bytes, and with some rows in pages, where rows do."""
    assert isinstance(trial.case, StepCase)
    step, problem, limit = make_step(trial.case), trial.case.problem, GPU_LIMITS[trial.case.dtype]
    right, worst = expected(step, problem), 0.0
    assert isinstance(backend, StepBackend)
    for stored in (step, in_pages(step, problem)):
        for name, a, b in zip(("out", "lse"), backend.attend_stored(stored, problem), right, strict=True):
            if not torch.allclose(a.double(), b.double(), atol=limit, rtol=limit):
                return f"{name} is off by more than {limit}", float("inf")
            finite = b.isfinite()
            apart = (a.double() - b.double())[finite].abs() / (limit + limit * b.double()[finite].abs())
            worst = max([worst, *apart.tolist()])
    return "", worst
