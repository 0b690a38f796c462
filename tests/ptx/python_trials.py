"""What the PTX of Triton and of numba.cuda is run on: the problem list and steps, on devices that they compile for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from helpers.pairwise import every_pair
from helpers.steps import GPU_BIASES, GPU_DTYPES, GPU_SHAPES, gpu_case
from ptx.trials import MANY_SPANS, Trial

from dilkit import Pattern
from dilkit.backends.numba.tilings import TABLE
from dilkit.backends.triton.sizes import HEAD_DIMS
from dilkit.device import Capability
from dilkit.testing.problems import OTHER_KINDS, PROBLEMS, SCORES, Case

DTYPES = {"triton": ("float32", "float16", "bfloat16"), "numba_cuda": ("float32", "float16")}
AMPERE: Capability = (8, 0)
OTHERS: dict[str, Capability] = {"triton": (9, 0), "numba_cuda": (5, 2)}
"""By backend, another device: of Triton the first with `wgmma`, of numba the oldest."""


def sizes(backend: str) -> Iterator[Trial]:
    """Rows and columns of more than one tile, causal and masked, for each head_dim that kernels have, on both devices."""
    numbers = HEAD_DIMS if backend == "triton" else sorted({tiling.head_dim for row in TABLE.values() for tiling in row})
    fields: dict[str, Any] = dict(pattern=Pattern([128, 150, 150], [1, 2, 32]), seq=150, heads=2, kv_heads=1, batch=1)
    for capability in (AMPERE, OTHERS[backend]):
        for number in numbers:
            for dtype in DTYPES[backend]:
                case = Case(feature="sizes", variant=str(number), head_dim=number - 1, dtype=dtype, is_causal=True, **fields)
                yield Trial("sizes", capability, replace(case, mask="random"), backend=backend)


def listed(backend: str) -> Iterator[Trial]:
    """The problem list; of Triton that of other kinds and of scores, too."""
    cases = PROBLEMS if backend == "numba_cuda" else (*PROBLEMS, *OTHER_KINDS, *SCORES)
    for case in cases:
        if case.dtype in DTYPES[backend] and not case.rows and not case.lengths:
            yield Trial("list", AMPERE, case, backend=backend)


def steps() -> Iterator[Trial]:
    """Every two of dtypes, shapes and biases; many spans."""
    rows = [row.values for row in every_pair(GPU_DTYPES, GPU_SHAPES, GPU_BIASES) if not row.marks]
    for at, row in enumerate(rows):
        yield Trial("steps", OTHERS["triton"] if at % 4 == 3 else AMPERE, replace(gpu_case(*row), seed=at), backend="triton")
    yield from (Trial("steps", capability, MANY_SPANS, backend="triton") for capability in (AMPERE, OTHERS["triton"]))


def every_trial() -> list[Trial]:
    """Those of both backends; the smaller lists first."""
    return [*sizes("triton"), *sizes("numba_cuda"), *steps(), *listed("triton"), *listed("numba_cuda")]
