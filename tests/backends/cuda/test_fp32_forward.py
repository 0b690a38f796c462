"""The fp32 forward kernel, run on the CPU: against the oracle, in any order of threads, to the last bit the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.host_compile import compile_kernel, shared_bytes
from helpers.host_launcher import HostLauncher
from torch import Tensor

from dilkit import Pattern
from dilkit.backends.cuda.arguments import make_arguments
from dilkit.backends.cuda.table import STORAGE, CudaKernel, kernel_for
from dilkit.backends.tiles.schedule import schedule
from dilkit.testing.accuracy import LIMITS
from dilkit.testing.conformance import expected
from dilkit.testing.problems import NESTED, PROBLEMS, Case
from dilkit.testing.tensors import Tensors, make_tensors
from dilkit.tools.bench.kernels.cases import STATIC_KIB

MAXWELL = 5, 2
ROOM = 256
"""Bytes of the shared memory that a kernel may declare on any GPU, `STATIC_KIB`, that stay free."""
BLOCKS = 3
BEYOND = 3
"""Rows of `out` after the last batch element, which nobody may write."""

SMALL = [case for case in PROBLEMS if case.dtype in STORAGE and not case.zero_keys]
DEEP = Pattern([128, 256, 512], [1, 2, 4])
GROUPS = Pattern([64, 128, 512], [1, 4, 16])
LARGE = [
    Case(
        feature="tiles",
        variant=variant,
        gradients=False,
        **{"head_dim": 64, "batch": 1, "heads": 2, "seq": 500, "pattern": DEEP, **fields},
    )
    for variant, fields in {
        "several of a class": {},
        "causal": dict(is_causal=True),
        "groups": dict(pattern=GROUPS, heads=4, seq=515),
        "groups causal half": dict(pattern=GROUPS, heads=4, seq=515, is_causal=True, dtype="float16"),
        "groups masked batch": dict(pattern=GROUPS, batch=2, mask="left", is_causal=True, seq=200),
        "grouped heads causal": dict(heads=4, kv_heads=2, is_causal=True, mask="random", seq=300),
        "wide": dict(head_dim=128, seq=330, mask="right"),
        "wide causal half": dict(head_dim=120, seq=200, is_causal=True, dtype="float16"),
        "wide groups": dict(head_dim=128, seq=300, dtype="bfloat16", pattern=Pattern([64, 256], [1, 8]), kv_heads=1),
        "96": dict(head_dim=96, seq=260, heads=1),
        "48 groups": dict(head_dim=48, seq=300, dtype="float16", pattern=Pattern([64, 256], [1, 8]), kv_heads=1),
        "72 of 96": dict(head_dim=72, seq=150, pattern=Pattern.dense(), is_causal=True),
        "33 of 48 once": dict(head_dim=33, seq=210, pattern=Pattern([64, 192], [1, 3], overlap="once")),
        "huge": dict(values="huge", seq=210),
    }.items()
]


def run(
    case: Case,
    order: str = "forward",
    seed: int = 0,
    vector: bool | None = None,
    checked: bool = False,
    tensors: Tensors | None = None,
    **changes: int,
) -> dict[str, Tensor]:
    """`out` and `lse` of `case`, or of other tensors, written over NaN, by the kernel with `changes`.

    With `checked`, blocks take every third tile instead of whichever is next.
    """
    tensors = tensors or make_tensors(case)
    room = torch.full((case.batch * case.seq + BEYOND, case.heads, case.head_dim), torch.nan, dtype=tensors.query.dtype)
    out = room[:-BEYOND].view(tensors.query.shape)
    lse = torch.full((case.batch, case.heads, case.seq), torch.nan)
    given = dict(query=tensors.query, key=tensors.key, value=tensors.value, out=out, lse=lse, mask=tensors.mask)
    aligned = all(fits(x) for x in (*tensors.qkv, out)) if vector is None else vector
    kernel = storing(kernel_for("forward", "float32", case.head_dim, MAXWELL, aligned), case.dtype)
    kernel = replace(kernel, **changes)
    launcher = HostLauncher(order, seed, checked=checked)
    for i, group in enumerate(schedule(case.problem(), kernel.tile_rows).groups):
        counter = np.zeros(1, np.int32)
        places = dict(tiles=group.query_tiles.ctypes.data, branches=group.branches.ctypes.data)
        if not checked:
            places["counter"] = counter.ctypes.data
        arguments = make_arguments(case.problem(), given, group, len(group.query_tiles), places, first=i == 0)
        launcher.launch(kernel, BLOCKS, arguments)
    assert room[-BEYOND:].isnan().all()
    return dict(out=out, lse=lse)


def storing(kernel: CudaKernel, dtype: str) -> CudaKernel:
    """The fp32 kernel for tensors of another dtype, whatever else would be chosen for those."""
    return replace(kernel, defines=tuple((name, STORAGE[dtype] if name == "STORAGE" else x) for name, x in kernel.defines))


def fits(x: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes and are a multiple long."""
    sizes = x.data_ptr(), *(n * x.element_size() for n in (*x.stride()[:3], x.shape[-1]))
    return all(size % 16 == 0 for size in sizes)


def judge(case: Case, found: dict[str, Tensor]) -> None:
    want = expected(case)
    for name, x in found.items():
        error = torch.where(want.exact[name] == x, 0.0, (x.double() - want.exact[name]).abs()).nan_to_num(nan=torch.inf).max()
        assert error <= LIMITS[name] * want.error[name], f"{name}: {error:.3g}, plain torch {want.error[name]:.3g}"


@pytest.mark.kernels
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_problems(case: Case) -> None:
    judge(case, run(case, order="random", seed=len(case.name)))


USUAL = ("grouped heads causal", "huge")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c.variant in USUAL else pytest.mark.slow, id=c.name) for c in LARGE]
)
def test_larger_problems(case: Case) -> None:
    judge(case, run(case))


@pytest.mark.slow
def test_twice_the_threads() -> None:
    case = LARGE[-1]
    judge(case, run(case, threads=128, blocks=3))


BITS = Case(feature="bits", variant="", batch=1, heads=2, kv_heads=1, seq=140, pattern=NESTED, is_causal=True, mask="random")


@pytest.mark.parametrize(
    "dtype", ["float16", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("float32", "bfloat16"))]
)
@pytest.mark.parametrize("head_dim", [48, *(pytest.param(size, marks=pytest.mark.slow) for size in (32, 64, 128))])
def test_the_same_bits_in_any_order_and_with_any_loads(dtype: str, head_dim: int) -> None:
    case = replace(BITS, dtype=dtype, head_dim=head_dim)
    want = run(case)
    for order, seed, vector in [("reverse", 0, True), ("random", 1, True), ("random", 2, False)]:
        for name, x in run(case, order, seed, vector).items():
            assert torch.equal(x, want[name])


def test_masked_keys_are_not_read() -> None:
    tensors = make_tensors(BITS)
    hidden = replace(tensors, key=tensors.key.clone(), value=tensors.value.clone())
    for x in (hidden.key, hidden.value):
        x[tensors.mask] = torch.nan
    want = run(BITS)
    for name, x in run(BITS, tensors=hidden).items():
        assert torch.equal(x, want[name])


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [16, 48, 64, 128])
def test_no_race_and_nothing_out_of_bounds(head_dim: int) -> None:
    case = replace(BITS, head_dim=head_dim, pattern=Pattern([64, 128], [1, 2]), dtype="float16")
    judge(case, run(case, checked=True))


def test_there_is_room_in_the_shared_memory_that_every_gpu_has() -> None:
    """The kernel that declares the most: whoever lets a tile, its keys or their place know more takes of what is left."""
    kernel = kernel_for("forward", "float32", 128, MAXWELL, packed=True, dropout=True)
    declared = shared_bytes(compile_kernel(kernel.source, tuple(kernel.macros.items()), False))
    limit = STATIC_KIB * 1024
    assert declared <= limit - ROOM, f"{declared} bytes of shared memory: {limit - declared} are left of {STATIC_KIB} KiB"
