"""Limits of the machine: a matmul, a copy and fused multiply-adds, timed in the rounds of what they stand beside."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from dilkit.tools.measure.timing import Call, clock_of
from dilkit.tools.results.record import Samples, Yardstick

MATMUL_SIZE = {"cpu": 2048, "cuda": 4096}
_MATMUL_BUDGET = 2.0
"""Seconds one matmul may take before a smaller one is measured instead."""
COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Bytes that are copied: by far more than fit into caches."""
ROUNDS = 1 << 23
"""Multiply-adds of a thread: some ten milliseconds, so that no single disturbance decides."""


class Ceilings:
    """Calls to time beside others: a CPU's fused multiply-adds, and with a `dtype` also a matmul and a copy.

    Multiply-adds are the CPU kernel's instructions, in registers, on as many threads as torch has when this is made; where the
    kernel was not built there are none. `size` is the matmul's, where it is not the default.
    """

    def __init__(self, dtype: str | None = None, device: str = "cpu", size: int | None = None) -> None:
        import torch

        self.calls: dict[str, Call] = {}
        self._amounts: dict[str, tuple[str, float, dict[str, Any]]] = {}
        if device == "cpu" and (multiply_adds := _multiply_adds()):
            flops, call = multiply_adds
            self._add("fma", call, "gflops", 1e-9 * flops)
        if dtype:
            size, multiply = square_matmul(dtype, device, size)
            self._add("matmul", multiply, "gflops", 2e-9 * size**3, size=size, dtype=dtype)
            source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
            self._add("copy", partial(torch.empty_like(source).copy_, source), "gb_per_s", 2e-9 * COPY_BYTES[device])

    def _add(self, name: str, call: Call, rate: str, amount: float, **sizes: Any) -> None:
        self.calls[f"ceiling {name}"] = call
        self._amounts[name] = rate, amount, sizes

    def rates(self, timed: Mapping[str, Samples]) -> dict[str, Yardstick]:
        """Return what was reached: matmul and multiply-adds in GFLOP/s, the copy in GB/s of what is read and written."""
        rates = {}
        for name, (rate, amount, sizes) in self._amounts.items():
            samples = timed[f"ceiling {name}"]
            rates[name] = Yardstick(samples, {rate: amount / samples.median_s} | sizes)
        return rates


def square_matmul(dtype: str = "float32", device: str = "cpu", size: int | None = None) -> tuple[int, Call]:
    """Return `(size, multiply)`: a matmul to time beside others, of random matrices of `size`, by default of `MATMUL_SIZE`.

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


def _multiply_adds() -> tuple[float, Call] | None:
    """Return (FLOPs of a call, the call), on all threads; None where the kernel was not built or does not run here."""
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
