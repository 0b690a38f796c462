"""Scores that are rounded by far more than 1, of queries that each see one key almost alone: its weight is 1 all the same."""

from __future__ import annotations

import torch

from dilkit import Pattern, SlidingWindow, dilated_attention
from dilkit.bias.base import Bias
from dilkit.oracle import oracle_attention

SIZES = {"float32": 1e9, "bfloat16": 1e9, "float16": 5e4, "float64": 1e19}
"""Largest query and key, by dtype."""

PATTERNS = {"dense": Pattern.dense(), "window": Pattern.of(SlidingWindow(19, 2)), "few rows": Pattern([3], [1])}


def check(
    backend: str, dtype: str, size: float, pattern: Pattern = PATTERNS["dense"], seq: int = 70, dim: int = 16, bias: Bias | None = None
) -> None:
    """Compare out, lse and gradients with the oracle's; raise AssertionError where they differ.

    Any key has a smaller product with a query than its own one, by a quarter of the largest element at least.
    """
    made, kind = torch.Generator().manual_seed(1), getattr(torch, dtype)
    value, noise, signs = (torch.rand(1, seq, 2, dim, generator=made, dtype=torch.float64) * 2 - 1 for _ in range(3))
    query, key, value = (((noise / 4 + signs.sign()) * size).to(kind), (signs.sign() * size).to(kind), value.to(kind))
    found = []
    for tensors, attend, options in (
        ((query, key, value), dilated_attention, dict(backend=backend, return_lse=True)),
        ((query.double(), key.double(), value.double()), oracle_attention, {}),
    ):
        tensors = tuple(x.requires_grad_() for x in tensors)
        out, lse = attend(*tensors, pattern, scale=0.1, bias=bias, **options)
        found.append((out, lse, *torch.autograd.grad(out.sum(), tensors)))
    assert all(x.isfinite().all() for x in found[0])
    for name, ours, right in zip(("out", "lse", "dquery", "dkey", "dvalue"), *found, strict=True):
        if name not in ("dquery", "dkey"):
            close = torch.isclose(ours.double(), right.double(), rtol=4 * torch.finfo(kind).eps, atol=1e-5)
            assert close.all(), f"{name} of {dtype}: {(ours - right).abs().max():.3g} off"
