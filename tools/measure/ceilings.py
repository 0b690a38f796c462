"""Limits of the machine: a matmul, a copy and fused multiply-adds, timed in the rounds of what they stand beside."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypedDict

from dilkit.tools.measure.timing import Call, clock_of
from dilkit.tools.results.record import CopyRate, FmaRate, MatmulRate, Samples

MATMUL_SIZE = {"cpu": 2048, "cuda": 4096}
_MATMUL_BUDGET = 2.0
"""Seconds one matmul may take before a smaller one is measured instead."""
COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Bytes that are copied: by far more than fit into caches."""
ROUNDS = 1 << 23
"""Multiply-adds of a thread: some ten milliseconds, so that no single disturbance decides."""
FMA, MATMUL, COPY = "ceiling fma", "ceiling matmul", "ceiling copy"


class Rates(TypedDict):
    """The fields of a benchmark case that hold its yardsticks."""

    matmul: MatmulRate | None
    copy: CopyRate | None
    fma: FmaRate | None


class Ceilings:
    """Calls to time beside others: a CPU's fused multiply-adds, and with a `dtype` also a matmul and a copy.

    Multiply-adds are the CPU kernel's instructions, in registers, on as many threads as torch has when this is made; where the
    kernel was not built there are none. `size` is the matmul's, where it is not the default.
    """

    def __init__(self, dtype: str | None = None, device: str = "cpu", size: int | None = None) -> None:
        self.calls: dict[str, Call] = {}
        self._flops, self._dtype, self._size = 0.0, dtype or "", 0
        self._copied = 2 * COPY_BYTES[device]
        if device == "cpu" and (multiply_adds := _multiply_adds()):
            self._flops, self.calls[FMA] = multiply_adds
        if dtype:
            self._size, self.calls[MATMUL] = square_matmul(dtype, device, size)
            self.calls[COPY] = whole_copy(device)

    def rates(self, timed: Mapping[str, Samples]) -> Rates:
        """The rates that were reached: matmul and multiply-adds in GFLOP/s, the copy in GB/s of what is read and written."""
        rates = Rates(matmul=None, copy=None, fma=None)
        if fma := timed.get(FMA):
            rates["fma"] = FmaRate(**vars(fma), gflops=1e-9 * self._flops / fma.median_s)
        if matmul := timed.get(MATMUL):
            rates["matmul"] = matmul_rate(self._size, self._dtype, matmul)
        if copy := timed.get(COPY):
            rates["copy"] = CopyRate(**vars(copy), gb_per_s=1e-9 * self._copied / copy.median_s, bytes=self._copied)
        return rates


def matmul_rate(size: int, dtype: str, samples: Samples) -> MatmulRate:
    """The rate of a matmul of square matrices: `2 * size**3` FLOPs over the median of `samples`."""
    return MatmulRate(**vars(samples), gflops=2e-9 * size**3 / samples.median_s, size=size, dtype=dtype)


def square_matmul(dtype: str = "float32", device: str = "cpu", size: int | None = None) -> tuple[int, Call]:
    """`(size, multiply)`: a matmul to time beside others, of random matrices of `size`, by default 2048 on a CPU, 4096 on a GPU.

    The size is halved until one product takes less than two seconds: half precision has no fast matmul on many CPUs.
    """
    import torch

    size = size or MATMUL_SIZE.get(device, MATMUL_SIZE["cpu"])
    probe = torch.ones(size // 8, size // 8, dtype=getattr(torch, dtype), device=device)
    expected = clock_of(device)(lambda: probe @ probe, 2) / 2 * 8**3
    while expected > _MATMUL_BUDGET and size > 256:
        size, expected = size // 2, expected / 8
    left = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    return size, lambda: left @ left


def whole_copy(device: str) -> Call:
    """A copy from one tensor to another."""
    import torch

    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    return partial(torch.empty_like(source).copy_, source)


def _multiply_adds() -> tuple[float, Call] | None:
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
