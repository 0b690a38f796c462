"""The forward kernel for Hopper, `kernels/hopper_forward.cu`: the calls that it serves, and how it is built.

No device has run it, so `CupyRaw` takes it only where it is asked to: `CupyRaw(hopper=True)`.
"""

from __future__ import annotations

from dilkit.backends.cuda.table import STORAGE, CudaKernel, padded
from dilkit.device import Capability
from dilkit.problem import Problem

SOURCE = "hopper_forward.cu"
CAPABILITY: Capability = (9, 0)
"""The only one: later devices do not have these instructions."""
HEAD_DIMS = (64, 128)
THREADS, TILE_ROWS = 384, 128
PANELS, ALIGNED = 6, 1024
"""In shared memory: panels of `TILE_ROWS` rows, for queries, two key tiles, two value tiles and results; bytes to align them."""


def hopper_kernel(problem: Problem, capability: Capability, vector: bool) -> CudaKernel | None:
    """Return the kernel for a forward pass of `problem`; None where it does not serve it. `vector`: see `kernel_for`."""
    size = padded(problem.head_dim)
    is_plain = not (problem.softcap or problem.bias or problem.dropout_p or problem.varlen)
    serves = is_plain and vector and problem.pattern.only_segments and problem.dtype != "float32"
    if not serves or capability != CAPABILITY or size not in HEAD_DIMS:
        return None
    defines = ("HEAD_DIM", size), ("STORAGE", STORAGE[problem.dtype]), ("VECTOR", 1)
    shared_bytes = PANELS * TILE_ROWS * size * 2 + ALIGNED
    return CudaKernel(SOURCE, "hopper_forward", THREADS, 1, TILE_ROWS, defines, shared_bytes)
