"""The kernel of delta = rowsum(dout * out), run on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.host_launcher import HostLauncher

from dilkit.backends.cuda.arguments import make_arguments
from dilkit.backends.cuda.table import STORAGE, kernel_for
from dilkit.testing.problems import Case

ROUNDINGS = 8


SIZES: list[dict[str, Any]] = [dict(seq=1, heads=1, batch=1), dict(seq=53, heads=3, batch=2), dict(seq=5, heads=7, batch=3)]
USUAL = [("float32", 16, True), ("bfloat16", 16, True), ("float16", 7, False), ("float32", 128, False)]
BUILDS = [
    pytest.param(dtype, head_dim, vector, marks=[] if (dtype, head_dim, vector) in USUAL else pytest.mark.slow)
    for vector in (False, True)
    for head_dim in (7, 16, 32, 40, 64, 96, 128)
    for dtype in STORAGE
    if not vector or head_dim % (16 // getattr(torch, dtype).itemsize) == 0  # rows are a multiple of 16 bytes
]


@pytest.mark.parametrize(("dtype", "head_dim", "vector"), BUILDS)
def test_right_for_every_row(dtype: str, head_dim: int, vector: bool) -> None:
    for sizes in SIZES:
        check(dtype, head_dim, vector, sizes)


def check(dtype: str, head_dim: int, vector: bool, sizes: dict[str, Any]) -> None:
    problem = Case(feature="dots", variant="", dtype=dtype, head_dim=head_dim, **sizes).problem()
    out, dout = torch.randn(2, problem.batch, problem.seq, problem.heads, head_dim).to(getattr(torch, dtype))
    delta = torch.full((problem.batch, problem.heads, problem.seq), torch.nan)
    kernel = kernel_for("dots", dtype, head_dim, (5, 2), vector)
    arguments = make_arguments(problem, dict(out=out, dout=dout, delta=delta))
    HostLauncher("random", workers=1).launch(kernel, 2, arguments)
    products = (dout.double() * out.double()).transpose(1, 2)
    error, rounding = (delta - products.sum(-1)).abs(), torch.finfo(torch.float32).eps * products.abs().sum(-1)
    assert (error <= ROUNDINGS * rounding).all()
