"""Differences of numba.cuda and its simulator, and the constants of all device functions.

The simulator runs kernels on the CPU, as Python. `NUMBA_ENABLE_CUDASIM` chooses it before numba is first imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config, cuda

SIMULATED: bool = config.ENABLE_CUDASIM
"""True if kernels run in the simulator."""

KERNEL_OPTIONS = {} if SIMULATED else {"lto": False}
"""Compiler options. All functions are inlined: optimising when linking wins nothing, and is not what tests compile."""

ALIGN = None if SIMULATED else 16
"""Bytes at multiples of which a tile starts in shared memory; the simulator knows no alignment."""

if SIMULATED:
    exp2, log2 = np.exp2, np.log2
else:
    from numba.cuda import libdevice

    exp2, log2 = libdevice.exp2f, libdevice.log2f

NEG_INF = np.float32(-math.inf)
"""The score of a missing pair: its weight is 0."""

ZERO, ONE = np.float32(0.0), np.float32(1.0)
LOG2E, LN2 = np.float32(math.log2(math.e)), np.float32(math.log(2.0))


def device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make `function` a part of every kernel that calls it: compiled into it, not called.

    The simulator runs `function` as it is, but replaces `cuda` by its own where it is used.
    """
    if SIMULATED and "cuda" not in function.__code__.co_names:
        return function  # which is several times faster
    options = {} if SIMULATED else {"forceinline": True}
    inlined: Callable[..., Any] = cuda.jit(device=True, **options)(function)
    return inlined
