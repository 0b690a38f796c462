"""Limits of the machine: a matmul and fused multiply-adds, timed in the rounds of what they stand beside."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from dilkit.tools.measure.timing import Call, clock_of
from dilkit.tools.results.rows import Row

MATMUL_SIZE = {"cpu": 2048, "cuda": 4096}
_MATMUL_BUDGET = 2.0
"""Seconds one matmul may take before a smaller one is measured instead."""
ROUNDS = 1 << 23
"""Multiply-adds of a thread: some ten milliseconds, so that no single disturbance decides."""


class Ceilings:
    """Calls to time beside others: a CPU's fused multiply-adds, and with a `dtype` also a matmul.

    Multiply-adds are the CPU kernel's instructions, in registers, on as many threads as torch has when this is made; where the
    kernel was not built there are none.
    """

    def __init__(self, dtype: str | None = None, device: str = "cpu") -> None:
        self.calls: dict[str, Call] = {}
        self._amounts: dict[str, tuple[float, dict[str, Any]]] = {}
        if device == "cpu" and (multiply_adds := _multiply_adds()):
            flops, self.calls["ceiling fma"] = multiply_adds
            self._amounts["fma"] = flops, {}
        if dtype:
            size, self.calls["ceiling matmul"] = square_matmul(dtype, device)
            self._amounts["matmul"] = 2 * size**3, dict(size=size, dtype=dtype)

    def rates(self, timed: Mapping[str, Row]) -> dict[str, Row]:
        """Return what was reached, in GFLOP/s."""
        rates = {}
        for name, (flops, sizes) in self._amounts.items():
            samples = timed[f"ceiling {name}"]
            rates[name] = Row(values=dict(gflops=1e-9 * flops / samples.median_s, **sizes)).timed(samples)
        return rates


def square_matmul(dtype: str, device: str) -> tuple[int, Call]:
    """Return `(size, multiply)`: a matmul of random matrices to time beside others, of `MATMUL_SIZE`.

    The size is halved until one product takes less than two seconds: half precision has no fast matmul on many CPUs.
    """
    import torch

    size = MATMUL_SIZE.get(device, MATMUL_SIZE["cpu"])
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
        from dilkit.backends.native import _native, backend as native

        one = partial(_native.multiply_add, native.instruction_set(), ROUNDS)
        flops = one()
    except (ImportError, RuntimeError, ValueError):
        return None
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads)
    return float(threads * flops), lambda: [job.result() for job in [pool.submit(one) for _ in range(threads)]]
