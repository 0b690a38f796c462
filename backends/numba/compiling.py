"""Differences of numba.cuda and its simulator, and the constants of all device functions.

The simulator runs kernels on the CPU, as Python. `NUMBA_ENABLE_CUDASIM` chooses it before numba is first imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config, cuda
from numpy import float32

SIMULATED: bool = config.ENABLE_CUDASIM
"""Whether kernels run in the simulator."""

ALIGN = None if SIMULATED else 16
"""Bytes at multiples of which a tile starts in shared memory; the simulator knows no alignment."""

exp2: Callable[..., Any]
log2: Callable[..., Any]
if SIMULATED:
    exp2, log2 = np.exp2, np.log2
else:
    from numba.cuda import libdevice

    exp2, log2 = libdevice.exp2f, libdevice.log2f

NEG_INF = float32(-math.inf)
"""The score of a pair that is not there: its weight is 0."""

ZERO, ONE = float32(0.0), float32(1.0)
LOG2E, LN2 = float32(math.log2(math.e)), float32(math.log(2.0))
LARGE_LSE, LSE_ROUNDING = float32(2.0**13), float32(3 * 2.0**-23)
"""Beyond the first, the rounding of an lse changes weights by 1/512 or more. The second bounds it, relative to the lse."""


def device(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as a part of every kernel that calls it: compiled into it, not called.

    The simulator runs `function` as it is, but replaces `cuda` by its own where it is used.
    """
    if SIMULATED and "cuda" not in function.__code__.co_names:
        return function  # which is several times faster
    options = {} if SIMULATED else {"forceinline": True}
    inlined: Callable[..., Any] = cuda.jit(device=True, **options)(function)
    return inlined
