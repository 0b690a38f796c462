"""What the machine at hand can do at most: a matmul, a copy, fused multiply-adds, timed in the rounds of what they are beside."""

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
"""What is copied: by far more than fits into caches."""
ROUNDS = 1 << 23
"""Of a thread's multiply-adds: some ten milliseconds, so that no single disturbance decides."""


class Rates(TypedDict):
    """The fields of a benchmark case that hold its yardsticks."""

    matmul: MatmulRate | None
    copy: CopyRate | None
    fma: FmaRate | None


class MultiplyAdds:
    """The ceiling of a CPU's arithmetic: fused multiply-adds of the CPU kernel's instructions, in registers.

    They run on as many threads as torch has when this is made; where the kernel was not built there are none. Where `calls` have
    been timed beside others, `rates` says what they reached.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.calls: dict[str, Call] = {}
        self._flops = 0.0
        if device == "cpu" and (found := _multiply_adds()):
            self._flops, self.calls["ceiling fma"] = found

    def rates(self, timed: Mapping[str, Samples]) -> Rates:
        """Of `timed`, the multiply-adds in GFLOP/s."""
        fma = timed.get("ceiling fma")
        rate = FmaRate(**vars(fma), gflops=1e-9 * self._flops / fma.median_s) if fma else None
        return Rates(matmul=None, copy=None, fma=rate)


class Ceilings(MultiplyAdds):
    """The ceilings of `device` and `dtype`: beside multiply-adds, which GPUs have none of, a matmul and a copy.

    `size` is the matmul's, where it is not the default.
    """

    def __init__(self, dtype: str, device: str = "cpu", size: int | None = None) -> None:
        super().__init__(device)
        self._dtype = dtype
        self._size, multiply = square_matmul(dtype, device, size)
        self.calls |= {"ceiling matmul": multiply, "ceiling copy": whole_copy(device)}
        self._copied = 2 * COPY_BYTES[device]

    def rates(self, timed: Mapping[str, Samples]) -> Rates:
        """All of them, of `timed`: the matmul and the multiply-adds in GFLOP/s, the copy in GB/s of what is read and written."""
        by_name, copy = super().rates(timed), timed["ceiling copy"]
        by_name["matmul"] = matmul_rate(self._size, self._dtype, timed["ceiling matmul"])
        by_name["copy"] = CopyRate(**vars(copy), gb_per_s=1e-9 * self._copied / copy.median_s, bytes=self._copied)
        return by_name


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
