"""Scores so large that products and sums rounded together, as GPUs round them, differ from those rounded apart by more than 1."""

from __future__ import annotations

from collections.abc import Iterator

import host_compile
import pytest
import torch
from host_launcher import HostLauncher

from dilkit import Pattern
from dilkit.backends.cupy_raw import CupyRaw
from dilkit.problem import Problem


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are compiled as GPUs run them: a product is rounded together with the sum that it is a part of."""
    flags = tuple(flag.replace("contract=off", "contract=fast") for flag in host_compile.FLAGS)
    monkeypatch.setattr(host_compile, "FLAGS", flags)
    for kept in host_compile.library, host_compile.compile_kernel:
        kept.cache_clear()
    yield
    for kept in host_compile.library, host_compile.compile_kernel:
        kept.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_row_of_huge_scores_comes_to_an_end(fused: None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 128, 1, 16) for _ in range(3))
    query, key, value = (3e4 * query).to(dtype).abs(), (3e4 * key).to(dtype).abs(), value.to(dtype)
    query, key = query.clamp(max=6e4), key.clamp(max=6e4)
    problem = Problem.of(query, key, Pattern([128], [1]))
    out, lse = CupyRaw(HostLauncher(workers=1), (8, 0)).forward(query, key, value, problem)
    scores = torch.einsum("bihd,bjhd->bhij", query.double(), key.double()) * problem.scale
    assert torch.allclose(lse.double(), scores.logsumexp(-1), rtol=1e-6)
    assert out.isfinite().all()
