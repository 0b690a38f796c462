"""The forward kernel on tensor cores, run on the CPU: against the oracle, in any order of threads, to the last bit the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.host_launcher import HostLauncher
from torch import Tensor

from dilkit import Pattern
from dilkit.backends.cuda.arguments import make_arguments
from dilkit.backends.cuda.table import CudaKernel, kernel_for
from dilkit.backends.tiles.schedule import LOW_ROWS, MOST_ROWS, schedule
from dilkit.testing.accuracy import LIMITS
from dilkit.testing.conformance import expected
from dilkit.testing.problems import PROBLEMS, Case
from dilkit.testing.tensors import make_tensors

KINDS = {
    "low": ((8, 0), LOW_ROWS),
    "two slots": ((8, 0), MOST_ROWS),
    "eight warps": ((8, 6), MOST_ROWS),
    "hopper": ((9, 0), MOST_ROWS),
}
"""Kernels that differ, for head_dim 128: the capability they are for, and the rows of tiles."""

SMALL = [replace(case, gradients=False) for case in PROBLEMS if case.dtype in ("float16", "bfloat16") and not case.zero_keys]
DEEP = Pattern([512, 1000], [1, 4])
LARGER = [
    Case(feature="tiles", variant=variant, **{"gradients": False, "batch": 1, "heads": 2, "dtype": "bfloat16", **fields})
    for variant, fields in {
        "classes": dict(pattern=DEEP, seq=1000, head_dim=64),
        "two groups": dict(pattern=Pattern([256, 512, 960], [1, 2, 16]), seq=960, head_dim=64, dtype="float16"),
        "two groups causal": dict(
            pattern=Pattern([256, 512, 960], [1, 2, 16]), seq=700, head_dim=120, is_causal=True, dtype="float16"
        ),
        "dense mask": dict(pattern=Pattern.dense(), seq=515, head_dim=96, mask="random", dtype="float16"),
        "dense causal": dict(pattern=Pattern.dense(), seq=515, head_dim=64, is_causal=True, dtype="float16"),
        "a row more than a tile": dict(pattern=Pattern.dense(), seq=65, head_dim=64, is_causal=True, dtype="float16"),
        "grouped heads": dict(pattern=DEEP, seq=600, heads=4, kv_heads=1, head_dim=32, mask="left", is_causal=True),
        "once": dict(pattern=Pattern([128, 384], [1, 3], overlap="once"), seq=500, head_dim=33),
        "16 of 16": dict(pattern=DEEP, seq=500, head_dim=16, dtype="float16"),
        "48": dict(pattern=DEEP, seq=300, head_dim=48, is_causal=True),
        "72 of 96": dict(pattern=DEEP, seq=300, head_dim=72, mask="right"),
        "128": dict(pattern=DEEP, seq=700, head_dim=128),
        "128 huge": dict(pattern=DEEP, seq=300, head_dim=128, values="huge"),
        "128 negative scale causal": dict(pattern=DEEP, seq=300, head_dim=128, scale=-0.2, is_causal=True),
    }.items()
]


def attention(case: Case, kernel: CudaKernel, launcher: HostLauncher | None = None, blocks: int = 3) -> dict[str, Tensor]:
    """`out` and `lse` of the kernel, group after group, on memory that holds NaN at first."""
    problem, tensors = case.problem(requires_grad=False), make_tensors(case)
    out = torch.full(tensors.query.shape, torch.nan, dtype=tensors.query.dtype)
    lse = torch.full((case.batch, case.heads, case.seq), torch.nan)
    given = dict(query=tensors.query, key=tensors.key, value=tensors.value, out=out, lse=lse, mask=tensors.mask)
    for i, group in enumerate(schedule(problem, kernel.tile_rows).groups):
        tiles, counter = group.query_tiles, np.zeros(1, np.int32)
        places = dict(tiles=tiles.ctypes.data, branches=group.branches.ctypes.data, counter=counter.ctypes.data)
        if len(tiles):
            arguments = make_arguments(problem, given, group, len(tiles), places, first=i == 0)
            (launcher or HostLauncher()).launch(kernel, blocks, arguments)
    return dict(out=out, lse=lse)


def kernel_of(case: Case, kind: str, vector: bool | None = None) -> CudaKernel:
    """The kernel of a kind for a case; with 16-byte loads or without, or (None) with them where the tensors allow it."""
    capability, rows = KINDS[kind]
    if vector is None:
        vector = case.head_dim % 8 == 0 and all(fits(x) for x in make_tensors(case).qkv)
    return kernel_for("forward", case.dtype, case.head_dim, capability, vector, rows)


def fits(x: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes."""
    return all(size % 16 == 0 for size in (x.data_ptr(), *(n * x.element_size() for n in x.stride()[:3])))


def judge(case: Case, found: dict[str, Tensor]) -> None:
    want = expected(case)
    for name, x in found.items():
        error = torch.where(want.exact[name] == x, 0.0, (x.double() - want.exact[name]).abs()).nan_to_num(nan=torch.inf).max()
        assert error <= LIMITS[name] * want.error[name], f"{name}: {error:.3g}, plain torch {want.error[name]:.3g}"


@pytest.mark.kernels
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_problems(case: Case) -> None:
    kind = ("low", "hopper")[len(case.name) % 2]
    judge(case, attention(case, kernel_of(case, kind), HostLauncher("random", len(case.name))))


USUAL = ("two groups causal", "a row more than a tile")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c.variant in USUAL else pytest.mark.slow, id=c.name) for c in LARGER]
)
def test_larger_problems(case: Case) -> None:
    for kernel in {kernel_of(case, kind) for kind in KINDS}:
        judge(case, attention(case, kernel))


@pytest.mark.parametrize(
    "kind", ["two slots", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "two slots")]
)
@pytest.mark.parametrize("head_dim", [pytest.param(32, marks=pytest.mark.slow), 128])
def test_the_same_bits_in_any_order_and_with_any_loads(head_dim: int, kind: str) -> None:
    sizes = dict(batch=1, heads=2, kv_heads=1, seq=300, head_dim=head_dim)
    case = Case(feature="bits", variant="", pattern=DEEP, is_causal=True, mask="random", dtype="float16", **sizes)
    want = attention(case, kernel_of(case, kind, vector=True))
    for order, seed, vector, blocks in [("reverse", 0, True, 1), ("random", 1, True, 5), ("random", 2, False, 2)]:
        found = attention(case, kernel_of(case, kind, vector), HostLauncher(order, seed), blocks)
        assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vector", [True, False])
def test_no_race_and_nothing_out_of_bounds(kind: str, vector: bool) -> None:
    pattern = Pattern([128, 256], [1, 16])
    case = Case(
        feature="checked", variant="", pattern=pattern, is_causal=True, mask="random", seq=250, head_dim=128, batch=1, heads=2
    )
    case = replace(case, dtype="float16", gradients=False)
    judge(case, attention(case, kernel_of(case, kind, vector), HostLauncher(checked=True)))
