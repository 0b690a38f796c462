"""The kernels in numba.cuda by role, the types of their arguments, and how they are compiled."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from numba import cuda, types

from dilkit.backends.numba.arguments import LaunchGroup, MaskView, Options, ProblemSizes, TensorView, Tiling
from dilkit.backends.numba.backward import dkeyvalue, dots, dquery
from dilkit.backends.numba.compiling import SIMULATED
from dilkit.backends.numba.forward import forward
from dilkit.device import Capability

KERNELS = {"forward": forward, "dots": dots, "dquery": dquery, "dkeyvalue": dkeyvalue}
"""By role, what makes the kernel for a tiling."""

COMPILING = {} if SIMULATED else {"lto": False}
"""Options: no optimising when linking, which wins nothing, all functions being inlined, and is not what the tests look at."""


def signature(role: str, dtype: str) -> Any:
    """The types of a kernel's arguments."""
    numbers = types.Array(types.float16 if dtype == "float16" else types.float32, 1, "C")
    table, by_row = types.Array(types.int32, 2, "C"), types.Array(types.float32, 3, "C")
    view = types.NamedTuple((numbers, types.int64, types.int64, types.int64), TensorView)
    mask = types.NamedTuple((types.Array(types.uint8, 1, "C"), types.int64, types.int64, types.int32), MaskView)
    sizes = types.NamedUniTuple(types.int32, 5, ProblemSizes)
    options = types.NamedTuple((types.int32, types.int32, types.float32), Options)
    group = types.NamedTuple((table, table, types.int32), LaunchGroup)
    common = sizes, options, group, mask, view, view, view
    return types.void(
        *{
            "forward": (*common, view, by_row),
            "dots": (sizes, view, view, by_row),
            "dquery": (*common, view, by_row, by_row, view),
            "dkeyvalue": (*common, view, by_row, by_row, view, view),
        }[role]
    )


@lru_cache(maxsize=256)
def compiled(role: str, dtype: str, tiling: Tiling, capability: Capability | None) -> Any:
    """The kernel, compiled for the current device, of `capability`; the simulator has none and compiles nothing."""
    return cuda.jit(signature(role, dtype), **COMPILING)(KERNELS[role](tiling))
