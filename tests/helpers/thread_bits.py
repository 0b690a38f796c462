"""Does the sdpa backend give the same bits on every number of threads? A program that prints a line for each case.

It is a process of its own because MKL reads `MKL_CBWR` when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dilkit import Pattern
from dilkit.backends.sdpa.backend import SDPA
from dilkit.inputs import Inputs
from dilkit.problem import Problem

THREADS = (1, 2, 3, 5)
SIZES = ((12007, 3, 3), (257, 1, 1), (1000, 6, 2), (283, 5, 5), (31, 1, 1))
"""(seq, heads, kv_heads): enough tokens for torch to split a merge, a single problem, grouped heads, a short odd sequence."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
PATTERN = Pattern([60, 100, 210], [1, 1, 5])


def results(seq: int, heads: int, kv_heads: int, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, ...]]:
    """`(out, lse, dquery, dkey, dvalue)` on each number of threads."""
    torch.manual_seed(0)
    query, key, value, dout = (torch.randn(1, seq, h, 33).to(dtype) for h in (heads, kv_heads, kv_heads, heads))
    problem = Problem.of(query, key, PATTERN, is_causal=seq % 2 == 1, requires_grad=True)
    for threads in THREADS:
        torch.set_num_threads(threads)
        out, lse = SDPA().forward(Inputs(query, key, value), problem)
        yield out, lse, *SDPA().backward(dout, Inputs(query, key, value), out, lse, problem)


if __name__ == "__main__":
    for dtype in DTYPES:
        for size in SIZES:
            first, *others = results(*size, dtype)
            same = all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
            print(dtype, *size, "equal" if same else "DIFFERENT", flush=True)
