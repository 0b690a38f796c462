"""Scores so large that products and sums rounded together, as GPUs round them, differ from those rounded apart by more than 1."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers import host_compile
from helpers.forks import in_child
from helpers.host_launcher import HostLauncher

from dilkit import Pattern
from dilkit.backends.cuda.backend import CupyRaw
from dilkit.inputs import Inputs
from dilkit.problem import Problem


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_row_of_huge_scores_comes_to_an_end(dtype: str) -> None:
    """In a process of its own, which can be ended if the kernel does not end."""
    assert in_child(partial(attend, dtype), limit=200) == "done"


def attend(dtype_name: str) -> None:
    """Kernels are compiled as GPUs run them: a product is rounded together with the sum that it is a part of."""
    torch.set_num_threads(1)  # a forked child has none of its parent's
    for known in (host_compile.library, host_compile.compile_kernel):
        known.cache_clear()
    host_compile.FLAGS = tuple(flag.replace("contract=off", "contract=fast").replace("-Og", "-O1") for flag in host_compile.FLAGS)
    torch.manual_seed(0)
    dtype = getattr(torch, dtype_name)
    query, key, value = (torch.randn(1, 128, 1, 16) for _ in range(3))
    query, key, value = (3e4 * query).to(dtype).abs(), (3e4 * key).to(dtype).abs(), value.to(dtype)
    query, key = query.clamp(max=6e4), key.clamp(max=6e4)
    problem = Problem.of(query, key, Pattern([128], [1]))
    out, lse = CupyRaw(HostLauncher(workers=1), (8, 0)).forward(Inputs(query, key, value), problem)
    scores = torch.einsum("bihd,bjhd->bhij", query.double(), key.double()) * problem.scale
    assert torch.allclose(lse.double(), scores.logsumexp(-1), rtol=1e-6)
    assert out.isfinite().all()
