"""Limits of the machine: a matmul and fused multiply-adds, timed in the rounds of what they stand beside."""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from dilkit.tools.measure.timing import Call, clock_of
from dilkit.tools.results.rows import ResultRow

MATMUL_SIZE = {"cpu": 2048, "cuda": 8192}
_IN_A_ROW = 0.01
"""Seconds of matmuls in a row on CUDA: that of one by itself varied by a factor of two within a run on an H200."""
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
        self._amounts: dict[str, tuple[float, int, dict[str, Any]]] = {}
        if device == "cpu" and (multiply_adds := _multiply_adds()):
            flops, self.calls["ceiling fma"] = multiply_adds
            self._amounts["fma"] = flops, 1, {}
        if dtype:
            size, count, self.calls["ceiling matmul"] = square_matmuls(dtype, device)
            self._amounts["matmul"] = 2 * size**3, count, dict(size=size, dtype=dtype)

    def rates(self, timed: Mapping[str, ResultRow]) -> dict[str, ResultRow]:
        """Return what was reached, in GFLOP/s."""
        rates = {}
        for name, (flops, count, sizes) in self._amounts.items():
            together = timed[f"ceiling {name}"]
            row = ResultRow(samples=tuple(sample / count for sample in together.samples), calls=count * together.calls)
            rates[name] = row.knowing(gflops=1e-9 * flops / row.median_s, **sizes)
        return rates


def square_matmuls(dtype: str, device: str) -> tuple[int, int, Call]:
    """Return `(size, count, multiply)`: matmuls of a random matrix of `MATMUL_SIZE` to time beside others, on CUDA many in a row.

    The size is halved until one product takes less than two seconds: half precision has no fast matmul on many CPUs.
    """
    size, clock = MATMUL_SIZE.get(device, MATMUL_SIZE["cpu"]), clock_of(device)
    probe = torch.ones(size // 8, size // 8, dtype=getattr(torch, dtype), device=device)
    probe @ probe  # the first product loads torch's library
    expected = clock(lambda: probe @ probe, 2) / 2 * 8**3
    while expected > _MATMUL_BUDGET and size > 256:
        size, expected = size // 2, expected / 8
    generator = torch.Generator(device)  # torch's own one may refuse after a CUDA graph whose capture failed
    left = torch.randn(size, size, generator=generator, device=device).to(getattr(torch, dtype))
    if device != "cuda":
        return size, 1, lambda: left @ left
    out = left @ left
    count = max(2, math.ceil(_IN_A_ROW / clock(lambda: torch.mm(left, left, out=out), 1)))
    return size, count, lambda: [torch.mm(left, left, out=out) for _ in range(count)]


def _multiply_adds() -> tuple[float, Call] | None:
    """Return (FLOPs of a call, the call), on all threads; None where the kernel was not built or does not run here."""
    try:
        from dilkit.backends.native import _native, backend as native

        one = partial(_native.multiply_add, native.instruction_set(), ROUNDS)
        flops = one()
    except (ImportError, RuntimeError, ValueError):
        return None
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads)
    return float(threads * flops), lambda: [job.result() for job in [pool.submit(one) for _ in range(threads)]]
