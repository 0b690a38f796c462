"""What the machine at hand can do at most: a matmul, a copy, fused multiply-adds, timed in the rounds of what they are beside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from dilkit.tools.measure import timing as measure
from dilkit.tools.measure.timing import MatmulRate, Samples

COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
"""What is copied: by far more than fits into caches."""
ROUNDS = 1 << 20
"""Of a thread's multiply-adds: some milliseconds."""
Calls = dict[str, Callable[[], Any]]


class Ceilings:
    """The ceilings of `device` and `dtype`; `size` is the matmul's, where it is not the default.

    Where `calls` have been timed beside others, `told` says what they reached.
    The multiply-adds are those of the CPU kernel's instructions, in registers, on as many threads as torch has: where it was not
    built, and on GPUs, there are none.
    """

    def __init__(self, dtype: str, device: str = "cpu", size: int | None = None) -> None:
        self._dtype = dtype
        self._size, multiply = measure.square_matmul(dtype, device, size)
        self.calls: Calls = {"ceiling matmul": multiply, "ceiling copy": whole_copy(device)}
        self._copied = 2 * COPY_BYTES[device]
        self._flops = 0.0
        if device == "cpu" and (found := _multiply_adds()):
            self._flops, self.calls["ceiling fma"] = found

    def matmul(self, timed: Mapping[str, Samples]) -> MatmulRate:
        """The matmul's rate."""
        return MatmulRate(self._size, self._dtype, timed["ceiling matmul"])

    def told(self, timed: Mapping[str, Samples]) -> dict[str, Any]:
        """All of them as plain data: "matmul" and "fma" in GFLOP/s, "copy" in GB/s of what is read and written."""
        copy = timed["ceiling copy"]
        found = dict(matmul=self.matmul(timed).to_dict())
        found["copy"] = dict(bytes=self._copied, gb_per_s=1e-9 * self._copied / copy.median, **copy.to_dict())
        if fma := timed.get("ceiling fma"):
            found["fma"] = dict(gflops=1e-9 * self._flops / fma.median, **fma.to_dict())
        return found


def whole_copy(device: str) -> Callable[[], Any]:
    """A copy from one tensor to another."""
    import torch

    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    return partial(torch.empty_like(source).copy_, source)


def _multiply_adds() -> tuple[float, Callable[[], Any]] | None:
    """(FLOPs of a call, the call), on all threads; None where the kernel was not built or does not run here."""
    import torch

    try:
        from dilkit.backends.native import _native
        from dilkit.backends.native import backend as native

        one = partial(_native.multiply_add, native.instruction_set(), ROUNDS)
        flops = one()
    except (ImportError, RuntimeError, ValueError):
        return None
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads)
    return float(threads * flops), lambda: [job.result() for job in [pool.submit(one) for _ in range(threads)]]
