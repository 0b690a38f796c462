"""The launches that go from the backend through numba.cuda to a GPU, redirected to a machine that notes them."""

from __future__ import annotations

import pytest
import torch
from helpers.launches.launch import Launch, parameter_bytes, pointer, target

from dilkit import Pattern
from dilkit.backend import missing_modules
from dilkit.backends.numba.tilings import tiling_for
from dilkit.backends.tiles.schedule import schedule
from dilkit.inputs import Inputs
from dilkit.problem import Problem

NEEDED = ("numba_cuda", "nvidia.cuda_nvcc", "nvidia.cuda_nvrtc")


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_modules(NEEDED)), reason="numba-cuda is not installed, or its compilers are not: make kernels")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_both_passes_are_redirected(dtype: str) -> None:
    from helpers.launches.from_numba import redirected

    launches: list[Launch] = []
    fields = dict(seq=300, heads=4, kv_heads=2, head_dim=32, batch=2, dtype=dtype)
    problem = Problem(pattern=Pattern([256, 300], [1, 64]), requires_grad=True, **fields)
    q, k, v = (torch.zeros(2, 300, n, 32, dtype=getattr(torch, dtype)) for n in (4, 2, 2))
    with redirected((8, 0), launches.append) as backend:
        out, lse = backend.forward(Inputs(q, k, v), problem)
        gradients = backend.backward(out, Inputs(q, k, v), out, lse, problem)
    given = {"forward": (q, k, v, out, lse), "dots": (out, out), "dquery": (q, k, v, out, lse), "dkeyvalue": (q, k, v, out, lse)}
    written = {"forward": (), "dots": (), "dquery": gradients[:1], "dkeyvalue": gradients[1:3]}
    for launch, (role, blocks) in zip(launches, expected(problem), strict=True):
        tiling = tiling_for(role, 32)
        assert role in launch.entry
        assert (launch.grid, launch.block, launch.shared_bytes) == ((blocks, 1, 1), (tiling.across, tiling.down, 1), 0)
        assert target(launch.ptx) == "sm_80"
        assert parameter_bytes(launch.ptx, launch.entry) == tuple(len(argument.data) for argument in launch.arguments)
        for x in (*given[role], *written[role]):
            assert pointer(x) in launch.arguments


def expected(problem: Problem) -> list[tuple[str, int]]:
    """Role and blocks of each launch."""
    launched = []
    for role in ("forward", "dots", "dquery", "dkeyvalue"):
        tiling = tiling_for(role, problem.head_dim)
        if role == "dots":
            launched.append((role, -(-problem.batch * problem.heads * problem.seq // tiling.threads)))
            continue
        for group in schedule(problem, tiling.rows).groups:
            tiles = group.key_tiles if role == "dkeyvalue" else group.query_tiles
            launched.append((role, problem.batch * len(tiles)))
    return launched
