"""Scores that are rounded by far more than 1."""

from functools import partial

import torch

from dilkit import Pattern, SlidingWindow, dilated_attention
from dilkit.oracle import oracle_attention
from dilkit.testing.tensors import HUGE

DENSE = Pattern.dense()
PATTERNS = {"dense": DENSE, "window": Pattern.of(SlidingWindow(19, 2)), "few rows": Pattern([3], [1])}


def check(backend: str, dtype: str, size: float = 0.0, pattern: Pattern = DENSE, seq: int = 70, dim: int = 16, bias=None):
    """Raise AssertionError where `out`, `lse` or gradients differ from the oracle's. Without a `size`, `HUGE`'s.

    Query i has its largest product with key i, by more than `size**2`. Gradients of queries and keys need only be finite: they
    are `size` times rounding errors.
    """
    made, kind, size = torch.Generator().manual_seed(1), getattr(torch, dtype), size or HUGE[dtype]
    value, noise, signs = (torch.rand(1, seq, 2, dim, generator=made, dtype=torch.float64) * 2 - 1 for _ in range(3))
    query, key, value = (((noise / 4 + signs.sign()) * size).to(kind), (signs.sign() * size).to(kind), value.to(kind))
    found, wide = [], [x.double() for x in (query, key, value)]
    own = partial(dilated_attention, backend=backend, return_lse=True)
    oracle = oracle_attention
    for attend, given in ((own, [query, key, value]), (oracle, wide)):
        tensors = [x.requires_grad_() for x in given]
        out, lse = attend(*tensors, pattern, scale=0.1, bias=bias)
        found.append((out, lse, *torch.autograd.grad(out.sum(), tensors)))
    assert all(x.isfinite().all() for x in found[0])
    for name, one, other in zip(("out", "lse", "dquery", "dkey", "dvalue"), *found, strict=True):
        if name not in ("dquery", "dkey"):
            rtol = max(4, dim / 8) * torch.finfo(kind).eps  # an lse is as large as a sum of `dim` products
            close = torch.isclose(one.double(), other.double(), rtol=rtol, atol=1e-5)
            assert close.all(), f"{name} of {dtype}: {(one - other).abs().max():.3g} off"
